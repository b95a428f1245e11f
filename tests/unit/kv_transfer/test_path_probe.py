"""Probes: what a read of the bytes that are kept for it says, and what has carried them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.paths import Lane
from kv_transfer.location import COPIED_BYTES, locate
from kv_transfer.path_probe import (
    MAX_DEVICE_PROBE_BYTES,
    MAX_PROBE_BYTES,
    PathProber,
    Traffic,
    keep_for_probes,
    seen,
    traffic,
)
from kv_transfer.protocol.events import PathProbed, ProbeFailed, ProbePath
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
NUM_BLOCKS, PROBE_BYTES = 4, 3 * LAYOUT.block_bytes
GUARD_BYTES = 65_536
QUIET: Traffic = {Lane.TCP: 0, Lane.RDMA: 0}


class End:
    def __init__(self, name: str, fabric: MemoryFabric, fill: int) -> None:
        self.bytes = np.full(NUM_BLOCKS * LAYOUT.block_bytes + PROBE_BYTES, fill, np.uint8)
        self.pool = PoolMemory(
            self.bytes.ctypes.data, NUM_BLOCKS, LAYOUT, memoryview(self.bytes.data), probe_bytes=PROBE_BYTES
        )
        self.transport = MemoryTransport(name, fabric)
        self.transport.register(self.pool)
        self.address = AgentAddress(
            name, 1, self.transport.metadata(), self.pool.address, NUM_BLOCKS, LAYOUT, 20.0, PROBE_BYTES
        )


class Pair:
    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.owner, self.reader = End("owner", self.fabric, 7), End("reader", self.fabric, 0)
        self.reader.transport.connect(self.owner.address)
        self.counted: Iterator[Traffic] = iter([QUIET, QUIET])
        self.prober = PathProber(self.reader.pool, lambda: next(self.counted))

    def start(self, num_bytes: int = PROBE_BYTES, timeout_s: float = 5.0) -> list[ProbeFailed]:
        probe = ProbePath("owner", num_bytes, timeout_s)
        return self.prober.start(self.reader.transport, self.owner.address, probe)

    def ends(self) -> list[PathProbed | ProbeFailed]:
        ends = [end for end in self.reader.transport.poll() if isinstance(end, ReadDone | ReadBroken)]
        assert all(self.prober.owns(end.handle) for end in ends)
        return [self.prober.end(end) for end in ends]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_probe_touches_no_block_on_either_side(pair: Pair) -> None:
    assert pair.start() == []
    (probed,) = pair.ends()
    assert isinstance(probed, PathProbed)
    assert (probed.peer, probed.num_bytes, probed.seen) == ("owner", PROBE_BYTES, Lane.UNKNOWN)
    assert probed.seconds > 0
    blocks = NUM_BLOCKS * LAYOUT.block_bytes
    assert not pair.reader.bytes[:blocks].any()
    assert (pair.reader.bytes[blocks:] == 7).all()


def test_bytes_that_a_network_device_has_counted_went_over_tcp(pair: Pair) -> None:
    pair.counted = iter([{Lane.TCP: 50, Lane.RDMA: 0}, {Lane.TCP: 50 + PROBE_BYTES, Lane.RDMA: 0}])
    pair.start()
    (probed,) = pair.ends()
    assert isinstance(probed, PathProbed)
    assert probed.seen is Lane.TCP


def test_a_probe_without_end_is_cancelled_and_says_so(pair: Pair) -> None:
    pair.fabric.stall_reads = True
    pair.start(timeout_s=0.0)
    assert pair.ends() == []
    pair.prober.time_out(pair.reader.transport)
    (failed,) = pair.ends()
    assert isinstance(failed, ProbeFailed)
    assert "cancelled" in failed.detail


def test_a_probe_that_cannot_begin_says_so_at_once(pair: Pair) -> None:
    pair.fabric.fail_operation(1, TransportError("no"))
    assert pair.start() == [ProbeFailed("owner", "no")]
    assert not pair.prober.probes


def test_rdma_counters_count_words_of_four_bytes(tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.write_text("Inter-| Receive\n face |bytes\n    lo: 1000 5 0\n  eth0:  234 1 0\n")
    port = tmp_path / "mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("25\n")
    assert traffic(devices, tmp_path) == {Lane.TCP: 1234, Lane.RDMA: 100}
    assert seen(QUIET, {Lane.TCP: 9, Lane.RDMA: 100}, 100) is Lane.RDMA
    assert seen(QUIET, {Lane.TCP: 89, Lane.RDMA: 89}, 100) is Lane.UNKNOWN


@pytest.mark.parametrize(("on_device", "most"), [(False, MAX_PROBE_BYTES), (True, MAX_DEVICE_PROBE_BYTES)])
@pytest.mark.parametrize("num_blocks", [1, 63, 64, 1_000, 100_000, 10_000_000])
def test_no_more_is_kept_for_probes_than_a_small_share_of_the_pool(num_blocks: int, on_device: bool, most: int) -> None:
    left, kept = keep_for_probes(num_blocks, LAYOUT, on_device)
    assert left * LAYOUT.block_bytes + kept == num_blocks * LAYOUT.block_bytes
    assert kept <= min(most, num_blocks * LAYOUT.block_bytes / 64)


def test_a_location_says_how_fast_memory_is_and_leaves_every_block_as_it_is() -> None:
    num_blocks = COPIED_BYTES // LAYOUT.block_bytes
    array = np.full(COPIED_BYTES + PROBE_BYTES + GUARD_BYTES, 3, np.uint8)
    array[COPIED_BYTES:] = 4
    view = memoryview(array.data)[: COPIED_BYTES + PROBE_BYTES]
    clock = iter([0.0, 4.0, 5.0, 7.0, 8.0, 16.0, 17.0, 20.0])  # each quarter is timed alone; the second took 2 s
    pool = PoolMemory(array.ctypes.data, num_blocks, LAYOUT, view, probe_bytes=PROBE_BYTES)
    location = locate(pool, clock.__next__)
    assert location.memory_bytes_per_s == pytest.approx(COPIED_BYTES / 4 / 2.0, rel=1e-3)
    assert location.machine
    assert not location.on_gpu
    assert (array[: COPIED_BYTES + PROBE_BYTES] == 3).all()
    assert (array[COPIED_BYTES + PROBE_BYTES :] == 4).all()


def test_a_pool_that_lies_in_the_caches_promises_nothing(pair: Pair) -> None:
    assert locate(pair.reader.pool).memory_bytes_per_s == 0.0
