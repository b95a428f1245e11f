"""The expected speed, the lane and the state of a path, and probes: what a read says, and what has carried it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from core.errors import TransportError
from core.handoff import AgentAddress, Location
from core.kv_layout import KVLayout
from core.paths import Lane, PathState, PathStatus
from kv_transfer.location import COPIED_BYTES, link_speed, locate
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
from kv_transfer.protocol.path_verdict import expected_bytes_per_s, judge, lane_of
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone

HERE = Location("a", memory_bytes_per_s=8e9, link_bytes_per_s=12.5e9)
BESIDE = Location("a", memory_bytes_per_s=6e9, link_bytes_per_s=12.5e9)
THERE = Location("b", memory_bytes_per_s=6e9, link_bytes_per_s=1.25e9)
GPU = Location("a", on_gpu=True, link_bytes_per_s=12.5e9)
GPU_BESIDE = Location("a", on_gpu=True, link_bytes_per_s=12.5e9)
GPU_THERE = Location("b", on_gpu=True, link_bytes_per_s=50e9)


ON_ONE_GPU, BESIDE_ON_IT, ON_ANOTHER = (
    Location("a", on_gpu=True, memory_bytes_per_s=speed, gpu=gpu)
    for speed, gpu in ((2e12, "GPU-1"), (1.9e12, "GPU-1"), (2e12, "GPU-2"))
)


@pytest.mark.parametrize(
    ("ours", "theirs", "configured", "expected"),
    [
        (HERE, BESIDE, 0.0, 6e9),
        (HERE, THERE, 0.0, 1.25e9),
        (HERE, GPU, 0.0, 0.0),
        (HERE, GPU, 3e9, 3e9),
        (HERE, GPU_THERE, 0.0, 12.5e9),
        (HERE, Location("c"), 0.0, 0.0),
        (ON_ONE_GPU, BESIDE_ON_IT, 0.0, 1.9e12),
        (ON_ONE_GPU, ON_ANOTHER, 0.0, 0.0),
    ],
)
def test_the_expected_speed_is_that_of_the_slower_memory_or_link_unless_one_is_configured(
    ours: Location, theirs: Location, configured: float, expected: float
) -> None:
    assert expected_bytes_per_s(ours, theirs, configured) == expected


@pytest.mark.parametrize(
    ("seen", "bytes_per_s", "ours", "theirs", "lane"),
    [
        (Lane.TCP, 5e9, HERE, BESIDE, Lane.TCP),
        (Lane.RDMA, 5e9, HERE, THERE, Lane.RDMA),
        (Lane.UNKNOWN, 5e9, HERE, BESIDE, Lane.SHARED_MEMORY),
        (Lane.UNKNOWN, 25e9, GPU, GPU_BESIDE, Lane.CUDA_IPC),
        (Lane.UNKNOWN, 4e9, GPU, GPU_BESIDE, Lane.UNKNOWN),  # through host memory
        (Lane.TCP, 25e9, GPU, GPU_BESIDE, Lane.TCP),
        (Lane.UNKNOWN, 25e9, HERE, GPU, Lane.UNKNOWN),
        (Lane.UNKNOWN, 25e9, GPU, GPU_THERE, Lane.UNKNOWN),
    ],
)
def test_uncounted_bytes_of_one_machine_moved_through_shared_memory_or_fast_between_gpus_by_cuda_ipc(
    seen: Lane, bytes_per_s: float, ours: Location, theirs: Location, lane: Lane
) -> None:
    assert lane_of(seen, bytes_per_s, ours, theirs) is lane


@pytest.mark.parametrize(
    ("lane", "bytes_per_s", "ours", "theirs", "state"),
    [
        (Lane.SHARED_MEMORY, 5e9, HERE, BESIDE, PathState.FINE),
        (Lane.SHARED_MEMORY, 1.4e9, HERE, BESIDE, PathState.SLOW),
        (Lane.TCP, 5e9, HERE, BESIDE, PathState.FALLBACK),  # on one machine, at any speed
        (Lane.TCP, 1.1e9, HERE, THERE, PathState.FINE),
        (Lane.TCP, 0.2e9, HERE, THERE, PathState.SLOW),
        (Lane.TCP, 1.1e9, GPU, GPU_THERE, PathState.FALLBACK),  # between GPUs, on any machines
        (Lane.RDMA, 11e9, GPU, GPU_THERE, PathState.FINE),
        (Lane.CUDA_IPC, 40e9, GPU, GPU_BESIDE, PathState.FINE),  # the expected speed is not known
        (Lane.UNKNOWN, 4e9, GPU, GPU_BESIDE, PathState.FALLBACK),
        (Lane.UNKNOWN, 11e9, GPU, GPU_THERE, PathState.FINE),
        (Lane.UNKNOWN, 1e9, GPU, GPU_THERE, PathState.SLOW),
        (Lane.UNKNOWN, 1e9, HERE, GPU, PathState.FINE),  # one pool is in host memory
        (Lane.UNKNOWN, 0.0, HERE, BESIDE, PathState.FINE),  # nothing was measured
        (Lane.UNKNOWN, 1.8e12, ON_ONE_GPU, BESIDE_ON_IT, PathState.FINE),
        (Lane.UNKNOWN, 0.2e12, ON_ONE_GPU, BESIDE_ON_IT, PathState.SLOW),
    ],
)
def test_a_path_is_slow_far_below_the_expected_speed_and_a_fallback_on_tcp_despite_a_faster_lane(
    lane: Lane, bytes_per_s: float, ours: Location, theirs: Location, state: PathState
) -> None:
    status = PathStatus("peer", PathState.CONNECTING, lane, bytes_per_s, expected_bytes_per_s(ours, theirs, 0.0))
    assert judge(status, ours, theirs, slow_share=0.25) is state


LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
NUM_BLOCKS, PROBE_BYTES = 4, 3 * LAYOUT.block_bytes
GUARD_BYTES = 65_536
QUIET: Traffic = {Lane.TCP: 0, Lane.RDMA: 0}


class End:
    def __init__(self, name: str, fabric: MemoryFabric, fill: int) -> None:
        self.bytes = np.full(NUM_BLOCKS * LAYOUT.block_bytes + PROBE_BYTES, fill, np.uint8)
        self.pool = PoolMemory(self.bytes.ctypes.data, NUM_BLOCKS, LAYOUT, self.bytes.data, probe_bytes=PROBE_BYTES)
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


def test_a_probe_touches_no_block_and_went_over_tcp_if_a_network_device_has_counted_it(pair: Pair) -> None:
    assert pair.start() == []
    (probed,) = pair.ends()
    assert isinstance(probed, PathProbed)
    assert (probed.peer, probed.num_bytes, probed.seen) == ("owner", PROBE_BYTES, Lane.UNKNOWN)
    assert probed.seconds > 0
    blocks = NUM_BLOCKS * LAYOUT.block_bytes
    assert not pair.reader.bytes[:blocks].any()
    assert (pair.reader.bytes[blocks:] == 7).all()
    pair.counted = iter([{Lane.TCP: 50, Lane.RDMA: 0}, {Lane.TCP: 50 + PROBE_BYTES, Lane.RDMA: 0}])
    pair.start()
    (counted,) = pair.ends()
    assert isinstance(counted, PathProbed)
    assert counted.seen is Lane.TCP


def test_a_probe_without_end_is_cancelled_and_says_so(pair: Pair) -> None:
    pair.fabric.stall_reads = True
    pair.start(timeout_s=0.0)
    assert pair.ends() == []
    pair.prober.time_out(pair.reader.transport, time.monotonic())
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


@pytest.mark.parametrize("kernel_copies", [True, False])
def test_a_location_measures_memory_and_changes_no_block(monkeypatch: pytest.MonkeyPatch, kernel_copies: bool) -> None:
    if not kernel_copies:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
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


@pytest.mark.parametrize(("allowed", "bits_per_s"), [("", 200e9), ("mlx5_0:1", 100e9)])
def test_the_link_is_the_fastest_rdma_port_that_ucx_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, bits_per_s: float
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", allowed)
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    for device, rate in (("mlx5_0", "100 Gb/sec (4X EDR)"), ("mlx5_1", "200 Gb/sec (4X HDR)")):
        port = tmp_path / device / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate)
    assert link_speed(tmp_path / "net", tmp_path) == bits_per_s / 8


def test_a_pool_that_lies_in_the_caches_promises_nothing(pair: Pair) -> None:
    assert locate(pair.reader.pool).memory_bytes_per_s == 0.0
