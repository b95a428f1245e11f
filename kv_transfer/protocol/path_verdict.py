"""The lane of a path, the speed that its hardware promises, and the verdict on a measured path.

The expected speed follows from the `Location` of both agents: on one machine the speed of a copy in memory, between
machines the speed of the slower link.
"""

from __future__ import annotations

from core.handoff import Location
from core.paths import Lane, PathState, PathStatus

STAGED_BYTES_PER_S = 10e9  # more than one core copies through host memory, less than a GPU reads over PCIe 4


def lane_of(seen: Lane, bytes_per_s: float, ours: Location, theirs: Location) -> Lane:
    """The lane of a measured path. `seen`: TCP or RDMA if a network device counted the bytes, else UNKNOWN.

    Bytes between host memories of one machine that no device counted moved through shared memory. Bytes between GPUs of
    one machine moved by cuda_ipc or through host memory. UCX does not tell which, but the speed does.
    """
    if seen is not Lane.UNKNOWN or ours.machine != theirs.machine or ours.on_gpu is not theirs.on_gpu:
        return seen
    if ours.on_gpu:
        return Lane.CUDA_IPC if bytes_per_s >= STAGED_BYTES_PER_S else Lane.UNKNOWN
    return Lane.SHARED_MEMORY


def expected_bytes_per_s(ours: Location, theirs: Location, configured: float) -> float:
    """`configured` if it is not 0, else the speed of the hardware; 0 = not known."""
    if configured:
        return configured
    if ours.machine == theirs.machine:
        if (ours.on_gpu or theirs.on_gpu) and not (ours.gpu and ours.gpu == theirs.gpu):
            return 0.0  # NVLink or PCIe, of an unknown generation
        return min(ours.memory_bytes_per_s, theirs.memory_bytes_per_s)
    return min(ours.link_bytes_per_s, theirs.link_bytes_per_s)


def judge(status: PathStatus, ours: Location, theirs: Location, slow_share: float) -> PathState:
    """The state of a measured path: FINE, SLOW or FALLBACK."""
    on_one_machine, between_gpus = ours.machine == theirs.machine, ours.on_gpu and theirs.on_gpu
    if status.lane is Lane.TCP and (on_one_machine or between_gpus):
        return PathState.FALLBACK
    measured, expected = status.bytes_per_s, status.expected_bytes_per_s
    if status.lane is Lane.UNKNOWN and on_one_machine and between_gpus and measured and not expected:
        return PathState.FALLBACK  # UCX stages the bytes through host memory
    if measured and measured < slow_share * expected:
        return PathState.SLOW
    return PathState.FINE
