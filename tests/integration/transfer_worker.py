"""The least worker that can hand off: a pool, a TransferMachine, a TransferAgent, and a queue between them.

`HandOff` is a hand-off of blocks from one such worker to another, in chunks.
"""

from __future__ import annotations

import math
import queue
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from core.config import TransferConfig
from core.handoff import AbortReason, OwnerState
from core.kv_layout import KVLayout
from core.machine import Tick
from core.scheduling.block_pool import BlockPool, Column
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import (
    AgentAction,
    AgentEvent,
    AgentFailed,
    OfferEnded,
    PullCompleted,
    PullFailed,
    TransferAction,
)
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.transports.transport import PoolMemory, Transport
from tests.integration.transfer_owner_process import host_pool

# One block is 368,640 bytes: SmolLM2-135M in bfloat16.
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
NUM_BLOCKS = 24  # of a hand-off
POOL_BLOCKS = 32
TRANSFER_ID = 7
FIRST_TOKEN = 42
PATIENCE_S = 20.0  # for a busy machine

OpenTransport = Callable[[str], Transport]
OpenPool = Callable[[KVLayout, int], tuple[np.ndarray, PoolMemory]]
Result = PullCompleted | PullFailed | OfferEnded | AgentFailed


class TransferWorker:
    def __init__(
        self,
        worker_id: str,
        open_transport: OpenTransport,
        config: TransferConfig,
        layout: KVLayout,
        num_blocks: int,
        open_pool: OpenPool = host_pool,
    ) -> None:
        self.bytes, memory = open_pool(layout, num_blocks)  # [num_blocks, block_bytes]
        self.events: queue.SimpleQueue[list[AgentEvent]] = queue.SimpleQueue()
        identity = AgentIdentity(worker_id, incarnation=zlib.crc32(worker_id.encode()))
        self.agent = TransferAgent(config, identity, memory, open_transport, self.events.put)
        self.pool = BlockPool(num_blocks)
        self.machine = TransferMachine(config, self.pool, self.agent.start())
        self.results: list[Result] = []

    def act(self, actions: list[TransferAction]) -> None:
        self.results += [action for action in actions if isinstance(action, PullCompleted | PullFailed | OfferEnded)]
        self.agent.perform([action for action in actions if isinstance(action, AgentAction)], self.machine.alive)

    def step(self, wait_s: float) -> None:
        """Take what the agent reports, or a Tick that is due, within `wait_s`."""
        deadline = self.machine.next_deadline()
        now = time.monotonic()
        try:
            events = self.events.get(timeout=max(0.0, min(wait_s, (deadline or now + wait_s) - now)))
        except queue.Empty:
            events = []
        self.take(events)
        if deadline is not None and time.monotonic() >= deadline:
            self.act(self.machine.handle(Tick(), time.monotonic()))
        self.machine.check()

    def take(self, events: list[AgentEvent]) -> None:
        for event in events:
            if isinstance(event, AgentFailed):
                self.results.append(event)
            else:
                self.act(self.machine.handle(event, time.monotonic()))

    def close(self) -> None:
        self.agent.close()


def run_until_results(workers: list[TransferWorker], num_results: int, seconds: float = 30.0) -> None:
    """Until every worker has that many results."""
    end = time.monotonic() + seconds
    while any(len(worker.results) < num_results for worker in workers):
        assert time.monotonic() < end, f"no end after {seconds} s: {[worker.results for worker in workers]}"
        for worker in workers:
            worker.step(0.001)


def random_content(worker: TransferWorker, blocks: list[int], seed: int) -> None:
    worker.bytes[blocks] = np.random.default_rng(seed).integers(0, 256, worker.bytes[blocks].shape, np.uint8)


@dataclass(frozen=True)
class Kind:
    """Of one side: where its pool is, and the transport over it."""

    open_transport: OpenTransport
    open_pool: OpenPool = host_pool


class HandOff:
    """A hand-off of NUM_BLOCKS blocks from `owner` to `puller`, offered in chunks."""

    def __init__(self, owner: Kind, puller: Kind, config: TransferConfig, puller_layout: KVLayout = LAYOUT) -> None:
        self.owner = TransferWorker("prefill", owner.open_transport, config, LAYOUT, POOL_BLOCKS, owner.open_pool)
        parts = LAYOUT.block_size // puller_layout.block_size
        self.puller = TransferWorker(
            "decode", puller.open_transport, config, puller_layout, POOL_BLOCKS * parts, puller.open_pool
        )
        sources, targets = self.owner.pool.allocate(NUM_BLOCKS), self.puller.pool.reserve(NUM_BLOCKS * parts)
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
        self.puller.act(puller.reserve_pull(TRANSFER_ID, owner.address, now))
        self.puller.act(puller.puller.start(TRANSFER_ID, range(len(self.targets)), now))
        self.puller.act(puller.puller.add_targets(TRANSFER_ID, dict(enumerate(self.targets)), now))
        self.owner.act(owner.offer(TRANSFER_ID, puller.address, math.inf, now))

    def offer_up_to(self, end: int) -> None:
        blocks, last = list(enumerate(self.sources[:end])), end == NUM_BLOCKS
        tokens = (FIRST_TOKEN,) if last else ()
        self.owner.act(self.owner.machine.owner.add_ready(TRANSFER_ID, blocks, last, tokens, time.monotonic()))

    def run(self) -> None:
        self.begin()
        for end in (8, 16, NUM_BLOCKS):
            self.offer_up_to(end)
            for worker in self.workers:
                worker.step(0.001)
        run_until_results(self.workers, 1, PATIENCE_S)

    def assert_completed(self) -> PullCompleted:
        assert self.owner.results == [OfferEnded(TRANSFER_ID, OwnerState.RELEASED, None, is_released=True)]
        (result,) = self.puller.results
        assert isinstance(result, PullCompleted)
        assert result.token_ids == (FIRST_TOKEN,)
        assert self.owner.pool.ledger()[Column.LEASED] == 0
        return result

    def assert_moved(self) -> PullCompleted:
        """Completed, and every byte is there."""
        assert np.array_equal(self.puller.bytes[self.targets], self.owner.bytes[self.sources])
        return self.assert_completed()

    def assert_failed(self, reason: AbortReason) -> PullFailed:
        (result,) = self.puller.results
        assert isinstance(result, PullFailed)
        assert result.reason is reason
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
