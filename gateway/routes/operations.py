"""Routes about the gateway itself: its models, its health, its version and its metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from core.errors import PermissionDenied, TandemError, Unauthenticated
from gateway.fleets import READY_TIMEOUT_S, ListedModel, ModelUnknown, RouterLink, fleets_of
from gateway.metrics import GatewayMetrics
from gateway.routes.calls import passed_on

PACKAGE = "tandem-serve"
STARTED_AT = int(time.time())
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _described(listed: ListedModel) -> dict[str, Any]:
    """A model in OpenAI's shape, with `max_model_len` as vLLM's clients read it."""
    return {
        "id": listed.name, "object": "model", "created": STARTED_AT, "owned_by": "tandem",
        "root": listed.model or None, "parent": listed.parent or None,
        "max_model_len": listed.info.context_length if listed.info is not None else None,
    }  # fmt: skip


async def list_models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_described(listed) for listed in fleets_of(request).listed()]})


async def get_model(request: Request) -> JSONResponse:
    name = request.path_params["name"].removesuffix("/")
    for listed in fleets_of(request).listed():
        if listed.name == name:
            return JSONResponse(_described(listed))
    raise ModelUnknown(name, fleets_of(request).names())


async def health(_: Request) -> Response:
    """200 as long as the process lives."""
    return Response()


async def ready(request: Request) -> JSONResponse:
    """200 if a model can be served now. `models` has the reason for each one that cannot."""
    faults = await fleets_of(request).faults()
    is_ready = not all(faults.values())
    return JSONResponse({"ready": is_ready, "models": {name: fault or "ready" for name, fault in faults.items()}},
                        200 if is_ready else 503)  # fmt: skip


async def version(_: Request) -> JSONResponse:
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # run from the sources without an installation
        found = "unknown"
    return JSONResponse({"version": found})


async def metrics(request: Request) -> PlainTextResponse:
    """The metrics of this HTTP server, and the page of each router that answers.

    Where the fleet has API keys, the page needs the key of an operator.
    """
    own: GatewayMetrics = request.app.state.metrics
    headers = passed_on(request, ("authorization",))
    links = [link for fleet in fleets_of(request).fleets for link in fleet.links]
    pages = await asyncio.gather(*(_router_page(link, headers) for link in links))
    return PlainTextResponse(own.page([page for page in pages if page is not None]), media_type=METRICS_TYPE)


async def _router_page(link: RouterLink, headers: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    """(address, page); None for a router that is away. Raises the refusal of the caller."""
    if link.fault:
        return None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return link.router.address, await link.router.metrics(headers)
    except (Unauthenticated, PermissionDenied):
        raise
    except (TimeoutError, TandemError):
        return None


async def home(_: Request) -> RedirectResponse:
    return RedirectResponse("/dashboard")


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", get_model),
    Route("/health", health),
    Route("/ready", ready),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/", home),
]
