"""The FastAPI application of the gateway. Each group of routes is a module of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request

from core.config import GatewayConfig
from gateway.fleets import Fleets


def build_app(config: GatewayConfig, fleets: Fleets) -> FastAPI:
    """The application. It opens `fleets` when it starts, and closes them when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await fleets.open()
        try:
            yield
        finally:
            await fleets.close()

    app = FastAPI(title="Tandem", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.config, app.state.fleets = config, fleets
    return app


def fleets_of(request: Request) -> Fleets:
    fleets: Fleets = request.app.state.fleets
    return fleets
