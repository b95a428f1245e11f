"""A hand-off of blocks from one least worker to another, in chunks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from core.config import TransferConfig
from core.handoff import OwnerState
from core.kv_layout import KVLayout
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import OfferEnded, PullCompleted
from tests.support.transfer_worker import OpenPool, OpenTransport, TransferWorker, host_pool

# One block is 368,640 bytes: SmolLM2-135M in bfloat16.
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
NUM_BLOCKS = 24  # of a hand-off
POOL_BLOCKS = 32
TRANSFER_ID = 7
FIRST_TOKEN = 42
PATIENCE_S = 20.0  # for a busy machine


def run_until_results(workers: list[TransferWorker], num_results: int, seconds: float = 30.0) -> None:
    """Until every worker has that many results."""
    end = time.monotonic() + seconds
    while any(len(worker.results) < num_results for worker in workers):
        assert time.monotonic() < end, f"no end after {seconds} s: {[worker.results for worker in workers]}"
        step_all(workers)


def step_all(workers: list[TransferWorker]) -> None:
    for worker in workers:
        worker.step(0.001)
        worker.machine.check()


def random_content(worker: TransferWorker, blocks: list[int], seed: int) -> None:
    worker.bytes[blocks] = np.random.default_rng(seed).integers(0, 256, worker.bytes[blocks].shape, np.uint8)


@dataclass(frozen=True)
class Kind:
    """Of one side: where its pool is, and the transport over it."""

    open_transport: OpenTransport
    open_pool: OpenPool = host_pool


class HandOff:
    """A hand-off of NUM_BLOCKS blocks from `owner` to `puller`, offered in chunks."""

    def __init__(self, owner: Kind, puller: Kind, config: TransferConfig) -> None:
        self.owner = TransferWorker("prefill", owner.open_transport, config, LAYOUT, POOL_BLOCKS, owner.open_pool)
        self.puller = TransferWorker("decode", puller.open_transport, config, LAYOUT, POOL_BLOCKS, puller.open_pool)
        sources, targets = self.owner.pool.allocate(NUM_BLOCKS), self.puller.pool.reserve(NUM_BLOCKS)
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
            step_all(self.workers)
        run_until_results(self.workers, 1, PATIENCE_S)

    def assert_moved(self) -> PullCompleted:
        """Completed, and every byte is there."""
        assert np.array_equal(self.puller.bytes[self.targets], self.owner.bytes[self.sources])
        assert self.owner.results == [OfferEnded(TRANSFER_ID, OwnerState.RELEASED, None, is_released=True)]
        (result,) = self.puller.results
        assert isinstance(result, PullCompleted)
        assert result.token_ids == (FIRST_TOKEN,)
        assert self.owner.pool.ledger()[Column.LEASED] == 0
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
