"""Two whole workers' worth of hand-off: machines, agents and a transport, in one process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AbortReason, Release
from kv_transfer.agent import NICENESS
from kv_transfer.protocol.events import AgentFailed, PullFailed
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import Transport
from protos.handoff_codec import encode
from tests.integration.transfer_owner_process import host_pool
from tests.integration.transfer_worker import LAYOUT, PATIENCE_S, TRANSFER_ID, HandOff, Kind, run_until_results
from tests.support.transfer_worker import OpenTransport, TransferWorker

CONFIG = TransferConfig(max_blocks_per_read=16, read_grace_s=20.0)  # a busy machine is no broken path


def hand_off_over(open_transport: OpenTransport) -> HandOff:
    kind = Kind(open_transport)
    return HandOff(kind, kind, CONFIG)


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def opener(fabric: MemoryFabric) -> OpenTransport:
    return lambda name: MemoryTransport(name, fabric)


@pytest.fixture
def hand_off(opener: OpenTransport) -> Iterator[HandOff]:
    one = hand_off_over(opener)
    yield one
    one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is a whole process's")
def test_threads_that_copy_and_hash_give_way_to_all_others(hand_off: HandOff) -> None:
    hand_off.run()
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    niceness: dict[str, set[int]] = {"transfer": set(), "digests": set(), "MainThread": set()}
    for thread in threading.enumerate():
        kind = thread.name.partition("-")[0]
        if kind in niceness:  # threads of other tests may end meanwhile
            assert thread.native_id is not None
            niceness[kind].add(os.getpriority(os.PRIO_PROCESS, thread.native_id) - ours)
    assert niceness == {"transfer": {NICENESS}, "digests": {NICENESS}, "MainThread": {0}}


@pytest.mark.parametrize(
    ("name", "payload"), [("stranger", b"nonsense"), (b"\xff\xfe", encode(Release(TRANSFER_ID, 7, 9, None)))]
)
def test_over_nixl_garbage_and_messages_of_a_sender_without_a_readable_name_are_dropped(
    name: Any, payload: bytes
) -> None:
    hand_off = hand_off_over(NixlTransport)
    victim, stranger = hand_off.owner, NixlTransport(name)
    _array, memory = host_pool(LAYOUT, 1)
    stranger.register(memory)
    stranger.connect(victim.machine.address)
    stranger.notify(victim.machine.address.name, payload)
    end = time.monotonic() + PATIENCE_S
    while not victim.agent.num_malformed:
        assert time.monotonic() < end, "it was not counted"
        stranger.poll()
        victim.step(0.001)
        victim.machine.check()
    stranger.close()
    hand_off.run()
    hand_off.assert_moved()
    hand_off.close()


class BrokenTransport(MemoryTransport):
    def poll(self):  # type: ignore[no-untyped-def]
        if self.fabric.stall_reads:
            raise RuntimeError("a bug")
        return []


def test_a_bug_in_the_thread_is_reported_once_and_ends_the_agent(fabric: MemoryFabric) -> None:
    worker = TransferWorker("w", lambda name: BrokenTransport(name, fabric), CONFIG, LAYOUT, 1)
    fabric.stall_reads = True
    run_until_results([worker], 1)
    assert worker.results == [AgentFailed("RuntimeError: a bug")]
    with pytest.raises(TransportError, match="a bug"):
        worker.agent.address  # noqa: B018
    worker.close()


def test_an_agent_that_cannot_start_says_why(fabric: MemoryFabric) -> None:
    def cannot_open(name: str) -> Transport:
        raise TransportError(f"no transport for {name}")

    with pytest.raises(TransportError, match=r"no transport for w\."):
        TransferWorker("w", cannot_open, CONFIG, LAYOUT, 1)
    assert not fabric.transports


def test_a_peer_that_cannot_be_reached_is_reported_lost(hand_off: HandOff) -> None:
    ghost = replace(hand_off.owner.machine.address, name="ghost", metadata=b"ghost")
    hand_off.puller.act(hand_off.puller.machine.reserve_pull(TRANSFER_ID, ghost, time.monotonic()))
    run_until_results([hand_off.puller], 1)
    (failed,) = hand_off.puller.results
    assert isinstance(failed, PullFailed)
    assert failed.reason is AbortReason.PEER_LOST
