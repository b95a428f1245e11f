"""Digests of offered blocks: computed when blocks are offered, filled into READYs in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import xxhash

from core.handoff import OfferedBlocks, Ready
from core.kv_layout import KVLayout
from kv_transfer.offered_digests import BLOCKS_PER_TURN, OfferedDigests
from kv_transfer.protocol.digests import Digests
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout("m", "float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=64)
NUM_BLOCKS = 64


@dataclass
class StoppedThread:
    """An executor of which the test runs the jobs."""

    turns: deque[Callable[[], None]]

    def submit(self, job: Callable[..., None], *args: object) -> Future[None]:
        future: Future[None] = Future()

        def turn() -> None:
            job(*args)
            future.set_result(None)

        self.turns.append(turn)
        return future


@dataclass
class Bench:
    array: np.ndarray
    digests: OfferedDigests
    woken: threading.Event
    sent: list[Digests] = field(default_factory=list)

    def ready(self, *blocks: int, peer: KVLayout = LAYOUT, ticket: int = 1) -> None:
        offered = OfferedBlocks.of((position, block, 0) for position, block in enumerate(blocks))
        self.digests.when_ready(
            Ready(ticket, 1, 1, ack=1, first_block=0, blocks=offered, last=False), peer, self.sent.append
        )

    def until_sent(self, count: int) -> list[Digests]:
        while len(self.sent) < count:
            assert self.woken.wait(5), "the thread computed nothing"
            self.woken.clear()
            self.digests.send_ready()
        return self.sent

    def digest(self, block: int) -> int:
        return xxhash.xxh3_64_intdigest(self.array[block])


def bench_of(enabled: bool) -> Bench:
    array = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    pool = PoolMemory(array.ctypes.data, NUM_BLOCKS, LAYOUT, array.reshape(-1).data)
    woken = threading.Event()
    return Bench(array, OfferedDigests("test", pool, enabled, woken.set), woken)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = bench_of(enabled=True)
    yield made
    made.digests.close()


def test_a_ready_carries_the_digests_its_blocks_had_when_they_were_offered(bench: Bench) -> None:
    before = (bench.digest(3), bench.digest(9))
    bench.digests.compute((3, 9))
    bench.ready(3, 9)
    assert bench.until_sent(1) == [before]
    bench.array[9] ^= 1
    bench.ready(9, 3)
    assert bench.until_sent(2)[1] == (before[1], before[0])


def test_a_block_that_is_offered_again_gets_a_new_digest(bench: Bench) -> None:
    bench.digests.compute(tuple(range(NUM_BLOCKS)))
    bench.ready(*range(NUM_BLOCKS))
    bench.until_sent(1)
    bench.array[5] ^= 1
    bench.digests.compute((5,))
    bench.ready(5)
    assert bench.until_sent(2)[1] == (bench.digest(5),)


def test_a_ready_without_blocks_does_not_overtake_a_ready_that_waits_for_its_digests(bench: Bench) -> None:
    bench.ready(1, peer=replace(LAYOUT, num_kv_heads=1))
    bench.ready()
    assert len(bench.until_sent(2)[0]) == 1
    assert bench.sent[1] == ()
    assert not bench.digests.busy


def test_a_ready_waits_for_no_job_behind_it_and_for_no_other_hand_off() -> None:
    bench = bench_of(enabled=True)
    turns: deque[Callable[[], None]] = deque()
    bench.digests._thread = StoppedThread(turns)  # type: ignore[assignment]
    bench.digests.compute(tuple(range(NUM_BLOCKS)))
    bench.ready(*range(NUM_BLOCKS), ticket=1)
    bench.digests.compute((5,))
    bench.ready(5, ticket=2)
    turns.popleft()()  # blocks 0 to 15 of the first job
    turns.popleft()()
    bench.digests.send_ready()
    assert bench.sent == [(bench.digest(5),)]
    for _ in range(NUM_BLOCKS // BLOCKS_PER_TURN - 1):
        bench.digests.compute((5, 40))  # the same blocks are offered again and again
        turns.popleft()()
    while len(bench.sent) < 2 and turns:
        turns.popleft()()
        bench.digests.send_ready()
    assert bench.sent[1:] == [tuple(map(bench.digest, range(NUM_BLOCKS)))]
    for _ in range(len(turns)):
        turns.popleft()()
    assert not turns


def test_a_ready_between_unequal_layouts_has_the_digests_of_its_pieces(bench: Bench) -> None:
    bench.ready(4, peer=replace(LAYOUT, num_kv_heads=1))
    (sent,) = bench.until_sent(1)
    heads = bench.array[4].reshape(2, 2, 2, -1)  # layers, K and V, heads
    assert sent == (xxhash.xxh3_64_intdigest(np.ascontiguousarray(heads[:, :, 0]).data),)


def test_without_digests_a_ready_leaves_at_once() -> None:
    bench = bench_of(enabled=False)
    bench.digests.compute((1,))
    bench.ready(1)
    assert bench.sent == [()]
    bench.digests.close()
