"""Two whole workers' worth of hand-off: machines, agents and a transport, in one process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AbortReason, OwnerState, Ready, Release
from core.kv_layout import KVLayout
from core.scheduling.block_pool import Column
from kv_transfer.agent import NICENESS
from kv_transfer.protocol.events import (
    AgentEvent,
    AgentFailed,
    Connect,
    MessageReceived,
    OfferEnded,
    PullCompleted,
    PullFailed,
    SendMessage,
)
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import Transport
from tests.integration.transfer_worker import TransferWorker, random_content, run_until_results

# One block is 368,640 bytes: SmolLM2-135M in bfloat16.
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
CONFIG = TransferConfig(max_blocks_per_read=16, read_grace_s=0.3)
ID = 7

Opener = Callable[[str], Transport]


class HandOff:
    """A hand-off of `num_blocks` blocks from `owner` to `puller`, offered in chunks."""

    def __init__(self, open_transport: Opener, num_blocks: int = 24, config: TransferConfig = CONFIG) -> None:
        self.owner = TransferWorker("prefill", open_transport, config, LAYOUT, 32)
        self.puller = TransferWorker("decode", open_transport, config, LAYOUT, 32)
        self.num_blocks = num_blocks
        sources, targets = self.owner.pool.allocate(num_blocks), self.puller.pool.reserve(num_blocks)
        assert sources is not None
        assert targets is not None
        self.sources, self.targets = sources, targets[::-1]
        random_content(self.owner, self.sources, seed=1)

    @property
    def workers(self) -> list[TransferWorker]:
        return [self.owner, self.puller]

    def begin(self) -> None:
        now = time.monotonic()
        owner, puller = self.owner.machine, self.puller.machine
        self.puller.act(puller.reserve_pull(ID, owner.address, now))
        self.puller.act(puller.puller.start(ID, range(len(self.targets)), now))
        self.puller.act(puller.puller.add_targets(ID, dict(enumerate(self.targets)), now))
        self.owner.act(owner.offer(ID, puller.address, now))

    def offer_up_to(self, end: int) -> None:
        blocks, last = list(enumerate(self.sources[:end])), end == self.num_blocks
        machine = self.owner.machine
        self.owner.act(machine.owner.add_ready(ID, blocks, last, 42 if last else None, time.monotonic()))

    def run(self) -> None:
        self.begin()
        for end in (8, 16, self.num_blocks):
            self.offer_up_to(end)
            for worker in self.workers:
                worker.step(0.001)
        run_until_results(self.workers, 1)

    def assert_completed(self) -> PullCompleted:
        assert self.owner.results == [OfferEnded(ID, OwnerState.RELEASED, None)]
        (result,) = self.puller.results
        assert isinstance(result, PullCompleted)
        assert result.first_token_id == 42
        assert np.array_equal(self.puller.bytes[self.targets], self.owner.bytes[self.sources])
        assert self.owner.pool.ledger()[Column.LEASED] == 0
        return result

    def assert_failed(self, reason: AbortReason) -> PullFailed:
        (result,) = self.puller.results
        assert isinstance(result, PullFailed)
        assert result.reason is reason
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def opener(fabric: MemoryFabric) -> Opener:
    return lambda name: MemoryTransport(name, fabric)


@pytest.fixture
def hand_off(opener: Opener) -> Iterator[HandOff]:
    one = HandOff(opener)
    yield one
    one.close()


def test_blocks_move_over_nixl_and_their_digests_fit() -> None:
    hand_off = HandOff(NixlTransport)
    hand_off.run()
    stats = hand_off.assert_completed().stats
    assert (stats.num_blocks, stats.num_blocks_reread) == (24, 0)
    hand_off.close()


def test_a_byte_that_changes_after_the_digest_is_noticed_over_nixl() -> None:
    hand_off = HandOff(NixlTransport)
    hand_off.begin()
    hand_off.offer_up_to(8)
    end = time.monotonic() + 20.0
    arrived: list[AgentEvent] = []
    while not any(
        isinstance(event, MessageReceived) and isinstance(event.message, Ready) and event.message.blocks
        for event in arrived
    ):
        assert time.monotonic() < end
        hand_off.owner.step(0.001)
        arrived += hand_off.puller.events.get(timeout=20.0) if not hand_off.puller.events.empty() else []
    hand_off.owner.bytes[hand_off.sources[3], 1000] ^= 0x10
    hand_off.puller.take(arrived)  # only now does it begin to read
    run_until_results([hand_off.puller], 1)
    assert "position 3" in hand_off.assert_failed(AbortReason.DIGEST_MISMATCH).detail
    hand_off.close()


def test_blocks_move_over_the_fake(hand_off: HandOff) -> None:
    hand_off.run()
    hand_off.assert_completed()


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


def test_a_dead_owner_fails_the_pull(fabric: MemoryFabric, hand_off: HandOff) -> None:
    fabric.stall_reads = True
    hand_off.begin()
    hand_off.offer_up_to(8)
    end = time.monotonic() + 20.0
    while not fabric.faults_done["stall"]:
        assert time.monotonic() < end
        for worker in hand_off.workers:
            worker.step(0.001)
    fabric.kill(hand_off.owner.agent.identity.name)
    run_until_results([hand_off.puller], 1)
    hand_off.assert_failed(AbortReason.PEER_LOST)


class NoReads(MemoryTransport):
    def start_read(self, peer: str, runs: Runs) -> int:
        raise TransportError(f"no read of {len(runs)} runs from {peer}")


def test_a_read_that_cannot_start_fails_the_pull(fabric: MemoryFabric) -> None:
    hand_off = HandOff(lambda name: NoReads(name, fabric))
    hand_off.begin()
    hand_off.offer_up_to(8)
    run_until_results(hand_off.workers, 1)
    assert "no read of" in hand_off.assert_failed(AbortReason.READ_FAILED).detail
    hand_off.close()


def test_what_is_no_message_is_dropped_and_counted(hand_off: HandOff, opener: Opener) -> None:
    stranger = TransferWorker("stranger", opener, CONFIG, LAYOUT, 1)
    transport = opener("raw")
    transport.register(stranger.agent.pool)
    transport.connect(hand_off.owner.machine.address)
    for payload in (b"", b"nonsense", b"\x08\x63", bytes(2_000_000)):
        transport.notify(hand_off.owner.agent.identity.name, payload)
    hand_off.run()
    hand_off.assert_completed()
    assert hand_off.owner.agent.num_malformed == 4
    transport.close()
    stranger.close()


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
    hand_off.puller.act(hand_off.puller.machine.reserve_pull(ID, ghost, time.monotonic()))
    run_until_results([hand_off.puller], 1)
    hand_off.assert_failed(AbortReason.PEER_LOST)


def test_closing_performs_what_is_queued(fabric: MemoryFabric, hand_off: HandOff) -> None:
    hand_off.run()
    seen: list[str] = []

    def fate(_sender: str, receiver: str, _payload: bytes) -> tuple[int, ...]:
        seen.append(receiver)
        return (0,)

    fabric.fate = fate
    owner = hand_off.owner.machine.address
    message = SendMessage(owner.name, Release(1, 1, 1, None))
    hand_off.puller.agent.perform([Connect(owner)] + [message] * 10, active=False)
    hand_off.puller.close()
    assert seen == [owner.name] * 10
