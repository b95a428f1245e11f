"""`shake_hands` reports every error, and gives vLLM's thread for handshakes no peer that does not greet."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_worker import nixl_handshake
from vllm_worker.handoff import EngineAddress
from vllm_worker.nixl_handshake import WorkerExtension, shake_hands


class FakeConnector:
    """The connector of vLLM's worker: it has shaken hands (None), or does so in the background."""

    def __init__(self, handshake: Future[None] | None = None) -> None:
        self.handshake = handshake
        self.calls: list[tuple[Any, ...]] = []

    def _ensure_handshake(
        self, engine_id: str, host: str, port: int, tp_size: int, dcp_size: int = 1, pp_size: int = 1
    ) -> Future[None] | None:
        self.calls.append((engine_id, host, port, tp_size, dcp_size, pp_size))
        return self.handshake


class EarlierConnector(FakeConnector):
    """That of vLLM 0.26."""

    def _ensure_handshake(  # type: ignore[override]
        self, engine_id: str, host: str, port: int, tp_size: int, pp_size: int = 1, notif_agents_only: bool = False
    ) -> Future[None] | None:
        self.calls.append((engine_id, host, port, tp_size, pp_size, notif_agents_only))
        return self.handshake


class FakeLlm:
    """Two processes compute, each with a connector."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *connectors: object) -> None:
        self._module = ModuleType("vllm.distributed.kv_transfer")
        for name in ("vllm", "vllm.distributed"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, self._module.__name__, self._module)
        self._workers = [(connector, WorkerExtension()) for connector in connectors]

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        results = []
        for connector, worker in self._workers:
            self._module.get_kv_transfer_group = lambda: SimpleNamespace(connector_worker=connector)  # type: ignore[attr-defined]  # noqa: B023
            results.append(getattr(worker, method)(*args, **(kwargs or {})))
        return results


def address_of(server: asyncio.Server) -> EngineAddress:
    return EngineAddress("engine", "127.0.0.1", server.sockets[0].getsockname()[1], tp_size=2)


@pytest.fixture
async def address() -> AsyncIterator[EngineAddress]:
    """Of a peer that greets."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield address_of(server)


async def test_every_process_shakes_hands(monkeypatch: pytest.MonkeyPatch, address: EngineAddress) -> None:
    pending: Future[None] = Future()
    connectors = FakeConnector(), FakeConnector(pending)
    call = asyncio.create_task(shake_hands(FakeLlm(monkeypatch, *connectors), address))
    done, _ = await asyncio.wait([call], timeout=3 * nixl_handshake.POLL_S)
    assert not done
    pending.set_result(None)
    assert await call == ""
    for connector in connectors:
        assert connector.calls == [("engine", "127.0.0.1", address.remote_port, 2, 1, 1)]


async def test_the_error_of_one_process_is_the_error(monkeypatch: pytest.MonkeyPatch, address: EngineAddress) -> None:
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("engine ID mismatch"))
    assert "mismatch" in await shake_hands(FakeLlm(monkeypatch, FakeConnector(), FakeConnector(failed)), address)


async def test_an_earlier_version_shakes_hands_unless_its_contexts_are_parallel(
    monkeypatch: pytest.MonkeyPatch, address: EngineAddress
) -> None:
    connector = EarlierConnector()
    assert await shake_hands(FakeLlm(monkeypatch, connector), address) == ""
    assert connector.calls == [("engine", "127.0.0.1", address.remote_port, 2, 1, False)]
    parallel = replace(address, dcp_size=2)
    assert "another way" in await shake_hands(FakeLlm(monkeypatch, connector), parallel)
    assert len(connector.calls) == 1


@pytest.mark.parametrize("connector", [None, object()])
async def test_another_version_of_vllm_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, address: EngineAddress, connector: object
) -> None:
    assert "another way" in await shake_hands(FakeLlm(monkeypatch, connector), address)


async def test_a_peer_that_is_dead_or_stopped_reaches_no_thread_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_handshake, "GREETING_TIMEOUT_S", 0.05)
    connector = FakeConnector()
    llm, silent = FakeLlm(monkeypatch, connector), asyncio.Event()

    async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        stopped = address_of(server)
        with pytest.raises(TimeoutError, match="did not greet"):
            await shake_hands(llm, stopped)
        silent.set()
    with pytest.raises(OSError, match="Connect"):
        await shake_hands(llm, stopped)  # nobody listens any more
    assert not connector.calls
