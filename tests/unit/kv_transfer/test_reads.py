"""A read is cut into slices, each pair gets the digest of the bytes that arrived, and the read ends once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from core.errors import PeerDisconnected, TransportError
from core.handoff import AbortReason
from core.kv_layout import KVLayout
from kv_transfer.protocol.events import ReadFailed, ReadFinished, StartRead
from kv_transfer.protocol.plan import Runs, TransferPlan, runs_of_blocks
from kv_transfer.reads import MAX_SLICES_IN_FLIGHT, SLICE_BYTES, Read, Reads
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout("m", "float32", num_layers=4, num_kv_heads=8, block_size=16, head_dim=64)  # 256 KiB a block
PER_SLICE = SLICE_BYTES // LAYOUT.block_bytes
NUM_BLOCKS = 30 * PER_SLICE
PLAN = TransferPlan(LAYOUT, LAYOUT)
SOURCE = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)


class Copier:
    """A transport for reads alone. It copies at the start of a read, or when the test calls `copy`."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.target = np.zeros_like(SOURCE)
        self.sizes: list[int] = []
        self.waiting: dict[int, Runs] = {}
        self.cancelled: list[int] = []
        self.fail_at: int | None = None  # the start of this slice raises

    def start_read(self, peer: str, runs: Runs) -> int:
        assert peer == "owner"
        handle = len(self.sizes)
        if handle == self.fail_at:
            raise TransportError("told to")
        self.sizes.append(sum(num_bytes for _, _, num_bytes in runs))
        self.waiting[handle] = runs
        if self.at_once:
            self.copy(handle)
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        return self.start_read(peer, runs_of_blocks(zip(sources, targets, strict=True), LAYOUT.block_bytes))

    def try_complete(self, handle: int) -> bool:
        return self.waiting.pop(handle, None) is not None if self.at_once else False

    def copy(self, handle: int) -> None:
        for source, target, num_bytes in self.waiting[handle]:
            self.target.reshape(-1)[target : target + num_bytes] = SOURCE.reshape(-1)[source : source + num_bytes]

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)


def copies(at_once: bool) -> Any:
    """A `Copier`, which is no whole transport."""
    return Copier(at_once)


def reads_into(copier: Copier, verify: bool = True) -> Reads:
    pool = PoolMemory(copier.target.ctypes.data, NUM_BLOCKS, LAYOUT, copier.target.reshape(-1).data)
    return Reads(pool, verify)


def start_of(num_blocks: int) -> StartRead:
    targets = tuple(NUM_BLOCKS - 1 - block for block in range(num_blocks))
    return StartRead(7, 1, "owner", tuple(range(num_blocks)), targets, timeout_s=1.0)


def digests_of(num_blocks: int) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(block) for block in SOURCE[:num_blocks])


def result_of(read: Read | None) -> ReadFinished | ReadFailed:
    """Of a read that has ended."""
    assert read is not None
    return read.result(0.5)


def test_slices_that_land_at_once_are_read_one_in_each_turn() -> None:
    copier = copies(at_once=True)
    reads, count = reads_into(copier), 2 * PER_SLICE + 3
    assert reads.start(copier, start_of(count), PLAN, 1.0) is None
    assert reads.take_turn(copier) is None
    assert reads
    assert result_of(reads.take_turn(copier)) == ReadFinished(7, digests_of(count), 0.5)
    assert copier.sizes == [SLICE_BYTES, SLICE_BYTES, 3 * LAYOUT.block_bytes]
    assert not reads


def test_a_short_read_ends_before_a_long_one_that_began_earlier() -> None:
    copier = copies(at_once=True)
    reads = reads_into(copier)
    assert reads.start(copier, start_of(3 * PER_SLICE), PLAN, 1.0) is None
    short = reads.start(copier, replace(start_of(2), read_id=8), PLAN, 1.0)
    assert result_of(short) == ReadFinished(8, digests_of(2), 0.5)
    assert reads.has_turns


@pytest.mark.parametrize("is_late", [False, True])
def test_a_read_that_is_lost_or_late_between_its_turns_ends_at_the_next_one(is_late: bool) -> None:
    copier = copies(at_once=True)
    reads = reads_into(copier)
    reads.start(copier, start_of(3 * PER_SLICE), PLAN, 1.0)
    if is_late:
        (read,) = reads.time_out(copier, 2.5)
        assert not reads.time_out(copier, 2.5)
    else:
        reads.lose("another")
        reads.lose("owner")
    ended = reads.take_turn(copier)
    assert isinstance(result_of(ended), ReadFailed)
    assert copier.sizes == [SLICE_BYTES], "nothing more was read"
    assert not reads
    assert not is_late or ended is read


def test_without_digests_a_read_is_one_slice() -> None:
    copier = copies(at_once=True)
    read = reads_into(copier, verify=False).start(copier, start_of(3 * PER_SLICE), PLAN, 1.0)
    assert result_of(read) == ReadFinished(7, (), 0.5)
    assert copier.sizes == [3 * SLICE_BYTES]


def test_slices_that_land_later_in_any_order_are_bounded_in_number() -> None:
    copier = copies(at_once=False)
    reads, count = reads_into(copier), 30 * PER_SLICE
    ended: list[Read | None] = [reads.start(copier, start_of(count), PLAN, 1.0)]
    while copier.waiting:
        assert ended == [None] * len(ended)
        assert len(copier.waiting) <= MAX_SLICES_IN_FLIGHT
        handle = max(copier.waiting)  # the youngest first
        copier.copy(handle)
        del copier.waiting[handle]
        ended.append(reads.on_done(copier, handle))
    assert len(copier.sizes) == 30
    assert result_of(ended[-1]) == ReadFinished(7, digests_of(count), 0.5)


def test_a_slice_that_breaks_ends_the_read_only_when_none_is_in_flight() -> None:
    copier = copies(at_once=False)
    reads = reads_into(copier)
    assert reads.start(copier, start_of(3 * PER_SLICE), PLAN, 1.0) is None
    assert reads.on_broken(copier, 1, PeerDisconnected("gone")) is None
    assert sorted(copier.cancelled) == [0, 2]
    assert reads.on_done(copier, 0) is None
    read = reads.on_broken(copier, 2, TransportError("cancelled"))
    assert read is not None
    assert read.peer_is_gone
    assert read.result(0.5) == ReadFailed(7, AbortReason.PEER_LOST, "gone")


def test_a_slice_that_cannot_start_cancels_those_before_it() -> None:
    copier = copies(at_once=False)
    copier.fail_at = 2
    reads = reads_into(copier)
    assert reads.start(copier, start_of(4 * PER_SLICE), PLAN, 1.0) is None
    assert sorted(copier.cancelled) == [0, 1]
    assert reads.on_broken(copier, 0, TransportError("cancelled")) is None
    read = reads.on_broken(copier, 1, TransportError("cancelled"))
    assert result_of(read) == ReadFailed(7, AbortReason.READ_FAILED, "told to")


def test_a_late_read_is_cancelled_once_and_says_how_long_it_took() -> None:
    copier = copies(at_once=False)
    reads = reads_into(copier)
    assert reads.start(copier, start_of(1), PLAN, began_at=4.0) is None
    assert not reads.time_out(copier, 4.9)
    assert not copier.cancelled
    assert [late.timed_out for late in reads.time_out(copier, 5.0)] == ["a read did not end within 1.0 s"]
    assert not reads.time_out(copier, 6.0)
    assert copier.cancelled == [0]
    read = reads.on_broken(copier, 0, TransportError("cancelled"))
    assert result_of(read) == ReadFailed(7, AbortReason.READ_FAILED, "a read did not end within 1.0 s")
