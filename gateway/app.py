"""The FastAPI application of the gateway. Each group of routes is a module of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware

from core.config import GatewayConfig
from gateway import chat, completions, operations, tokens
from gateway.errors import install_error_handlers
from gateway.fleets import Fleets
from gateway.front_door import FrontDoor
from gateway.guardrails import load_guardrail
from gateway.metrics import GatewayMetrics

ROUTES = ("gateway.responses", "gateway.dashboard.routes")


def build_app(config: GatewayConfig, fleets: Fleets, metrics: GatewayMetrics | None = None) -> FastAPI:
    """The application. It opens `fleets` when it starts, and closes them when it ends.

    Raises `ConfigError` if the guardrail cannot be loaded.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await fleets.open()
        try:
            yield
        finally:
            await fleets.close()

    app = FastAPI(
        title="Tandem", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the gateway has its own
    )  # fmt: skip
    app.state.config, app.state.fleets = config, fleets
    app.state.metrics = metrics or GatewayMetrics()
    app.state.guardrail = load_guardrail(config.guardrail)
    for module in (operations, completions, chat, tokens):
        app.include_router(module.router)
    for name in ROUTES:
        if importlib.util.find_spec(name) is not None:
            app.include_router(importlib.import_module(name).router)
    install_error_handlers(app)
    app.add_middleware(FrontDoor, config=config, metrics=app.state.metrics)
    if config.cors_origins:  # the last one added is the outermost, so refusals have its headers, too
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )  # fmt: skip
    return app


def fleets_of(request: Request) -> Fleets:
    fleets: Fleets = request.app.state.fleets
    return fleets


def metrics_of(request: Request) -> GatewayMetrics:
    metrics: GatewayMetrics = request.app.state.metrics
    return metrics
