"""The application of the gateway. Each group of routes is a module of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Scope

from core.config import GatewayConfig
from gateway.dashboard import routes
from gateway.dashboard.feed import Feeds
from gateway.errors import HANDLERS
from gateway.fleets import Fleets
from gateway.guardrails import load_guardrail
from gateway.http.body import WaitingBodies
from gateway.http.middleware import MAX_OPEN_REQUESTS, HttpMiddleware
from gateway.metrics import GatewayMetrics
from gateway.routes import chat, completions, operations, responses, tokens
from gateway.routes.calls import passed_on
from runtime.tracing.telemetry import Telemetry
from runtime.validation_threads import ValidationThreads


def _with_slash(route: Route) -> list[Route]:
    """The same route with a slash at its end. A redirect would name the scheme and the host behind a proxy, and many
    clients follow none for a POST."""
    is_open = route.path == "/" or route.path.endswith(":path}")
    return [] if is_open else [Route(f"{route.path}/", route.endpoint, methods=sorted(route.methods or ()))]


def build_app(config: GatewayConfig, fleets: Fleets, telemetry: Telemetry) -> Starlette:
    """The application. It opens `fleets` when it starts, and closes them when it ends.

    Raises `ConfigError` if the guardrail cannot be loaded.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await fleets.open()
        try:
            yield
        finally:
            await fleets.close()
            threads.close()

    metrics, threads = GatewayMetrics(), ValidationThreads(MAX_OPEN_REQUESTS)

    async def authorize(scope: Scope) -> None:
        await fleets.authorize(passed_on(Request(scope)))

    middleware = [Middleware(HttpMiddleware, config=config, authorize=authorize, metrics=metrics, telemetry=telemetry)]
    if config.cors_origins:  # outermost, so refusals have its headers, too
        cors = Middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id", "x-tandem-trace-id", "traceresponse"],
        )  # fmt: skip
        middleware.insert(0, cors)
    modules = (operations, completions, chat, responses, tokens, routes)
    app = Starlette(
        routes=[each for module in modules for route in module.ROUTES for each in (route, *_with_slash(route))],
        middleware=middleware,
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.state.config, app.state.fleets, app.state.metrics, app.state.threads = config, fleets, metrics, threads
    app.state.waiting_bodies = WaitingBodies()
    app.state.guardrail, app.state.feeds = load_guardrail(config.guardrail), Feeds()
    return app
