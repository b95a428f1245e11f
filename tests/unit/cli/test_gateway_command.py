"""`tandem gateway`, with a server that ends at once."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from cli import gateway
from core.config import TandemConfig
from core.errors import TandemError


class EndingServer:
    fleets, url = SimpleNamespace(fleets=()), "http://127.0.0.1:1"

    async def start(self) -> None:
        self.made = [object()]

    async def failed(self) -> str:
        self.is_collected = any(each is self.made for each in gc.get_objects())
        return "it ends"

    async def drain(self, _: float) -> None:
        pass


def test_collections_skip_the_objects_that_the_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    server, config = EndingServer(), TandemConfig()
    monkeypatch.setattr(gateway, "_server", lambda _, __: server)
    try:
        with pytest.raises(TandemError, match="it ends"):
            gateway.serve_gateway(replace(config, gateway=replace(config.gateway, port=0)), [], Console(quiet=True))
    finally:
        gc.unfreeze()
    assert not server.is_collected
