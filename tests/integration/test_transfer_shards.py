"""Hand-offs between pools of unequal shape: real agents, one transfer for each pair of shards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from core.config import TransferConfig
from core.kv_layout import KVLayout
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import PullCompleted
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import Transport
from tests.integration.transfer_owner_process import real_transport
from tests.support.transfer_worker import TransferWorker

WHOLE = KVLayout(model="m", dtype="bfloat16", num_layers=3, num_kv_heads=4, block_size=16, head_dim=8)
HALVES = (replace(WHOLE, num_kv_heads=2), replace(WHOLE, num_kv_heads=2, first_kv_head=2))
NUM_TOKENS = 150  # not a whole number of blocks
CONFIG = TransferConfig(max_blocks_per_read=4)

Opener = Callable[[str], Transport]


def whole_sequence() -> np.ndarray:
    """[layers, 2, heads, tokens, head_dim] of random numbers, as if a model had computed them."""
    shape = (WHOLE.num_layers, 2, WHOLE.num_kv_heads, NUM_TOKENS, WHOLE.head_dim)
    return np.random.default_rng(9).integers(1, 2**16, shape).astype(np.uint16)


def shard_of(sequence: np.ndarray, layout: KVLayout) -> np.ndarray:
    return sequence[:, :, layout.first_kv_head : layout.first_kv_head + layout.num_kv_heads]


class Shard:
    """A worker that holds some heads of the sequence, and the blocks it holds them in."""

    def __init__(self, name: str, open_transport: Opener, layout: KVLayout) -> None:
        self.layout = layout
        num_blocks = layout.num_blocks_for(NUM_TOKENS)
        self.worker = TransferWorker(name, open_transport, CONFIG, layout, num_blocks + 3)
        self.num_blocks = num_blocks
        self.blocks: list[int] = []

    @property
    def tokens(self) -> np.ndarray:
        """A view of its blocks as [position, layers, 2, heads, block_size, head_dim]."""
        return self.worker.bytes.view(np.uint16).reshape(-1, *self.layout.block_shape)

    def compute(self, sequence: np.ndarray) -> None:
        self.blocks = (self.worker.pool.allocate(self.num_blocks) or [])[::-1]
        mine, size = shard_of(sequence, self.layout), self.layout.block_size
        for position, block in enumerate(self.blocks):
            piece = mine[:, :, :, position * size : (position + 1) * size]
            self.tokens[block, :, :, :, : piece.shape[3]] = piece

    def offer(self, transfer_id: int, reader: Shard) -> None:
        now = time.monotonic()
        self.worker.act(self.worker.machine.offer(transfer_id, reader.worker.machine.address, math.inf, now))
        half = len(self.blocks) // 2
        for end, last in ((half, False), (len(self.blocks), True)):
            offered = list(enumerate(self.blocks[:end]))
            self.worker.act(self.worker.machine.owner.add_ready(transfer_id, offered, last, (7,) if last else (), now))

    def pull(self, transfer_id: int, owner: Shard) -> None:
        now, machine = time.monotonic(), self.worker.machine
        self.blocks = self.blocks or (self.worker.pool.reserve(self.num_blocks) or [])
        self.worker.act(machine.reserve_pull(transfer_id, owner.worker.machine.address, now))
        targets = dict(enumerate(self.blocks))
        self.worker.act(machine.puller.start(transfer_id, targets, now, num_tokens=NUM_TOKENS))
        self.worker.act(machine.puller.add_targets(transfer_id, targets, now))

    def assert_holds(self, sequence: np.ndarray) -> None:
        mine, size = shard_of(sequence, self.layout), self.layout.block_size
        for position, block in enumerate(self.blocks):
            piece = mine[:, :, :, position * size : (position + 1) * size]
            assert np.array_equal(self.tokens[block, :, :, :, : piece.shape[3]], piece), f"position {position}"


def hand_off(
    open_transport: Opener, owners: list[KVLayout], pullers: list[KVLayout]
) -> tuple[list[Shard], list[Shard]]:
    """Every owner's part to every puller; all of it checked."""
    sequence = whole_sequence()
    sources = [Shard(f"prefill-{i}", open_transport, layout) for i, layout in enumerate(owners)]
    targets = [Shard(f"decode-{i}", open_transport, layout) for i, layout in enumerate(pullers)]
    for source in sources:
        source.compute(sequence)
    pairs = [(source, target) for source in sources for target in targets]
    for transfer_id, (source, target) in enumerate(pairs, 1):
        target.pull(transfer_id, source)
        source.offer(transfer_id, target)
    everybody = [shard.worker for shard in sources + targets]
    end = time.monotonic() + 30.0
    while sum(len(worker.results) for worker in everybody) < 2 * len(pairs):
        assert time.monotonic() < end, [worker.results for worker in everybody]
        for worker in everybody:
            worker.step(0.001)
            worker.machine.check()
    for shard in targets:
        assert all(isinstance(result, PullCompleted) for result in shard.worker.results), shard.worker.results
        shard.assert_holds(sequence)
    for shard in sources:
        assert shard.worker.pool.ledger()[Column.LEASED] == 0
    return sources, targets


def close(*groups: list[Shard]) -> None:
    for group in groups:
        for shard in group:
            shard.worker.close()


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def memory(fabric: MemoryFabric) -> Opener:
    return lambda name: MemoryTransport(name, fabric)


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
def test_two_shards_become_one(transport: str) -> None:
    close(*hand_off(real_transport(transport), list(HALVES), [WHOLE]))


def test_one_becomes_two_shards(memory: Opener) -> None:
    sources, targets = hand_off(memory, [WHOLE], list(HALVES))
    moved = [result.stats.num_bytes for shard in targets for result in shard.worker.results if
             isinstance(result, PullCompleted)]  # fmt: skip
    assert moved == [WHOLE.num_blocks_for(NUM_TOKENS) * WHOLE.block_bytes // 2] * 2, "each moves its heads alone"
    close(sources, targets)


@pytest.mark.parametrize(("owner_size", "puller_size"), [(32, 16), (8, 32)])
def test_shards_and_block_sizes_may_differ_at_once(memory: Opener, owner_size: int, puller_size: int) -> None:
    owners = [replace(half, block_size=owner_size) for half in HALVES]
    close(*hand_off(memory, owners, [replace(WHOLE, block_size=puller_size)]))


def test_a_bit_flipped_between_unequal_pools_is_read_again(memory: Opener, fabric: MemoryFabric) -> None:
    fabric.flip_byte_in_read(1)
    sources, targets = hand_off(memory, [WHOLE], list(HALVES))
    assert fabric.faults_done["flip"] == 1
    stats = [result.stats for shard in targets for result in shard.worker.results if isinstance(result, PullCompleted)]
    assert [each.num_bytes for each in stats] == [sources[0].num_blocks * WHOLE.block_bytes // 2] * 2, "its heads alone"
    assert sum(each.num_blocks_reread for each in stats) == 1
    close(sources, targets)
