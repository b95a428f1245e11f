"""Routes about the gateway itself: its models, its health, its version and its metrics."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from gateway.fleets import Fleets, ListedModel, ModelUnknown
from gateway.metrics import GatewayMetrics

router = APIRouter()

PACKAGE = "tandem-serve"
STARTED_AT = int(time.time())
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _fleets(request: Request) -> Fleets:
    fleets: Fleets = request.app.state.fleets
    return fleets


def _described(listed: ListedModel) -> dict[str, Any]:
    """A model in OpenAI's shape, with `max_model_len` as vLLM's clients read it."""
    return {
        "id": listed.name, "object": "model", "created": STARTED_AT, "owned_by": "tandem",
        "root": listed.model or None, "parent": None,
        "max_model_len": listed.info.context_length if listed.info is not None else None,
    }  # fmt: skip


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_described(listed) for listed in _fleets(request).listed()]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    for listed in _fleets(request).listed():
        if listed.name == name:
            return _described(listed)
    raise ModelUnknown(name, _fleets(request).names())


@router.get("/health")
async def health() -> Response:
    """200 as long as the process lives."""
    return Response()


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 if a model can be served now. `models` has the reason for each one that cannot."""
    faults = await _fleets(request).faults()
    is_ready = not all(faults.values())
    return JSONResponse({"ready": is_ready, "models": {name: fault or "ready" for name, fault in faults.items()}},
                        200 if is_ready else 503)  # fmt: skip


@router.get("/version")
async def version() -> dict[str, str]:
    try:
        return {"version": importlib.metadata.version(PACKAGE)}
    except importlib.metadata.PackageNotFoundError:  # run from the sources without an installation
        return {"version": "unknown"}


@router.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    own: GatewayMetrics = request.app.state.metrics
    return PlainTextResponse(own.page(), media_type=METRICS_TYPE)


@router.get("/", include_in_schema=False)
async def home() -> RedirectResponse:
    return RedirectResponse("/dashboard")
