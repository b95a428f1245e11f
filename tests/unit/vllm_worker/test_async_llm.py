"""`AsyncEngine` without vLLM: the tasks of its requests."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from core.request import Request, SamplingParams
from vllm_worker.async_llm import AsyncEngine
from vllm_worker.engine import Prompt


class SlowEngine(AsyncEngine):
    """Its requests take a while to end, as those of vLLM do."""

    async def _generate(self, prompt: Prompt) -> None:  # noqa: ARG002
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.01)


def test_an_aborted_request_does_not_hide_its_successor_of_the_same_name() -> None:
    arguments: Any = None

    def named() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "r"]

    async def run() -> None:
        engine = SlowEngine(arguments)
        prompt = Prompt("r", Request("r", (1,), 1, SamplingParams(max_tokens=1)), offers=False)
        for _ in range(2):
            engine.submit(prompt)
            await asyncio.sleep(0)
            engine.abort("r")
        aborted = named()
        engine.submit(prompt)
        await asyncio.wait(aborted)
        engine.abort("r")
        await asyncio.wait(named(), timeout=10.0)
        assert named() == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "own", "devices"), [("127.0.0.1", None, "lo"), ("127.0.0.1", "eth1", "eth1"), ("10.0.0.2", None, None)]
)
def test_ucx_listens_on_loopback_alone_where_the_worker_does_unless_told_otherwise(
    host: str, own: str | None, devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_worker.async_llm.Guardian", Mock(return_value=Mock(sockets="/nowhere")))
    environment = {} if own is None else {"UCX_NET_DEVICES": own}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "vllm", None)
    arguments: Any = SimpleNamespace(host=host, side_port=1)
    with pytest.raises(ImportError):
        asyncio.run(AsyncEngine(arguments).start(Mock()))
    assert environment.get("UCX_NET_DEVICES") == devices
