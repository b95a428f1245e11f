"""Digests are kept from when they are asked for; READYs and answers come in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import xxhash

from core.handoff import OfferedBlocks, Ready
from core.kv_layout import KVLayout
from kv_transfer.digests import Digests
from kv_transfer.events import BlocksChecked, CheckBlocks, KeepDigests
from kv_transfer.kept_digests import KeptDigests
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout("m", "float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=64)
NUM_BLOCKS = 64


@dataclass
class Bench:
    array: np.ndarray
    digests: KeptDigests
    woken: threading.Event
    told: list[Digests | BlocksChecked] = field(default_factory=list)

    def ready(self, *blocks: int, transfer_id: int = 1, peer: KVLayout = LAYOUT) -> None:
        offered = OfferedBlocks.of((position, block, 0) for position, block in enumerate(blocks))
        message = Ready(transfer_id, 1, 1, ack=1, first_block=0, blocks=offered, last=False)
        self.digests.of_offered(message, peer, self.told.append)

    def check(self, *blocks: int, transfer_id: int = 1) -> None:
        asked = CheckBlocks(transfer_id, tuple((block, 5) for block in blocks))
        self.digests.check(asked, self.told.append)

    def until_told(self, count: int) -> list[Digests | BlocksChecked]:
        while len(self.told) < count:
            assert self.woken.wait(5), "the thread has nothing to say"
            self.woken.clear()
            self.digests.take()
        return self.told

    def digest(self, block: int) -> int:
        return xxhash.xxh3_64_intdigest(self.array[block])


def bench_of(enabled: bool) -> Bench:
    array = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    pool = PoolMemory(array.ctypes.data, NUM_BLOCKS, LAYOUT, array.reshape(-1).data)
    woken = threading.Event()
    return Bench(array, KeptDigests("test", pool, enabled, woken.set), woken)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = bench_of(enabled=True)
    yield made
    made.digests.close()


def test_a_ready_carries_what_was_kept_and_not_what_is_there_now(bench: Bench) -> None:
    before = (bench.digest(3), bench.digest(9))
    bench.digests.keep(KeepDigests((3, 9)))
    bench.ready(3, 9)
    assert bench.until_told(1) == [before]
    bench.array[9] ^= 1
    bench.ready(9, 3)
    assert bench.until_told(2)[1] == (before[1], before[0])


def test_what_is_kept_again_is_computed_again(bench: Bench) -> None:
    bench.digests.keep(KeepDigests(tuple(range(NUM_BLOCKS))))
    bench.ready(*range(NUM_BLOCKS))
    bench.until_told(1)
    bench.array[5] ^= 1
    bench.digests.keep(KeepDigests((5,)))
    bench.ready(5)
    assert bench.until_told(2)[1] == (bench.digest(5),)


def test_a_check_names_the_blocks_that_have_changed(bench: Bench) -> None:
    bench.digests.keep(KeepDigests((1, 2, 3)))
    bench.ready(1, 2, 3)
    bench.until_told(1)
    bench.array[2, 77] ^= 4
    bench.check(1, 2, 3)
    assert bench.until_told(2)[1] == BlocksChecked(1, ((2, 5),))


def test_no_ready_overtakes_a_check_and_one_of_a_spoilt_transfer_does_not_leave(bench: Bench) -> None:
    bench.digests.keep(KeepDigests((1, 2)))
    bench.ready(1)
    bench.until_told(1)
    bench.array[2] ^= 1
    bench.check(1, 2, transfer_id=7)
    bench.ready(1, transfer_id=7)
    bench.ready(transfer_id=7)
    bench.ready(1, transfer_id=8)
    assert bench.until_told(3)[1:] == [BlocksChecked(7, ((2, 5),)), (bench.digest(1),)]
    assert not bench.digests.busy


def test_a_ready_between_unequal_layouts_has_the_digests_of_its_pieces(bench: Bench) -> None:
    bench.digests.keep(KeepDigests((4,)))
    bench.ready(4, peer=replace(LAYOUT, num_kv_heads=1))
    (told,) = bench.until_told(1)
    heads = bench.array[4].reshape(2, 2, 2, -1)  # layers, K and V, heads
    assert told == (xxhash.xxh3_64_intdigest(heads[:, :, 0].tobytes()),)


def test_without_digests_a_ready_leaves_at_once_and_nothing_is_spoilt() -> None:
    bench = bench_of(enabled=False)
    bench.digests.keep(KeepDigests((1,)))
    bench.check(1)
    bench.ready(1)
    assert bench.told == [BlocksChecked(1, ()), ()]
    bench.digests.close()
