"""The expected speed, the lane and the state of a path."""

from __future__ import annotations

import pytest

from core.handoff import Location
from core.paths import Lane, PathState, PathStatus
from kv_transfer.protocol.path_verdict import expected_bytes_per_s, judge, lane_of

HERE = Location("a", memory_bytes_per_s=8e9, link_bytes_per_s=12.5e9)
BESIDE = Location("a", memory_bytes_per_s=6e9, link_bytes_per_s=12.5e9)
THERE = Location("b", memory_bytes_per_s=6e9, link_bytes_per_s=1.25e9)
GPU = Location("a", on_gpu=True, link_bytes_per_s=12.5e9)
GPU_BESIDE = Location("a", on_gpu=True, link_bytes_per_s=12.5e9)
GPU_THERE = Location("b", on_gpu=True, link_bytes_per_s=50e9)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [(BESIDE, 6e9), (THERE, 1.25e9), (GPU, 0.0), (GPU_THERE, 12.5e9), (Location("c"), 0.0)],
)
def test_the_expected_speed_is_that_of_the_slower_memory_or_link(theirs: Location, expected: float) -> None:
    assert expected_bytes_per_s(HERE, theirs, 0.0) == expected


def test_a_configured_speed_overrides_that_of_the_hardware() -> None:
    assert expected_bytes_per_s(HERE, GPU, 3e9) == 3e9


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
    ],
)
def test_a_path_is_slow_far_below_the_expected_speed_and_a_fallback_on_tcp_despite_a_faster_lane(
    lane: Lane, bytes_per_s: float, ours: Location, theirs: Location, state: PathState
) -> None:
    status = PathStatus("peer", PathState.CONNECTING, lane, bytes_per_s, expected_bytes_per_s(ours, theirs, 0.0))
    assert judge(status, ours, theirs, slow_share=0.25) is state


def test_within_one_gpu_the_speed_of_its_copy_is_expected_and_between_two_gpus_nothing_is() -> None:
    one = Location("a", on_gpu=True, memory_bytes_per_s=2e12, gpu="GPU-1")
    beside = Location("a", on_gpu=True, memory_bytes_per_s=1.9e12, gpu="GPU-1")
    other = Location("a", on_gpu=True, memory_bytes_per_s=2e12, gpu="GPU-2")
    assert expected_bytes_per_s(one, beside, 0.0) == 1.9e12
    assert expected_bytes_per_s(one, other, 0.0) == 0.0


@pytest.mark.parametrize(("bytes_per_s", "state"), [(1.8e12, PathState.FINE), (0.2e12, PathState.SLOW)])
def test_an_unknown_lane_between_gpus_is_judged_by_its_speed_where_one_is_expected(
    bytes_per_s: float, state: PathState
) -> None:
    status = PathStatus("peer", PathState.CONNECTING, Lane.UNKNOWN, bytes_per_s, 2e12)
    assert judge(status, GPU, GPU_BESIDE, slow_share=0.25) is state
