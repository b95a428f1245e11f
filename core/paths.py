"""The path between two transfer agents: its lane, its speed, and the verdict on both.

The expected speed follows from the two agents' `Location`: on one machine the speed of a copy in memory, between
machines the speed of the slower link. `judge` compares it with the measured speed. Where a pool is on a device,
`device_path` decides how the bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from core.errors import MemoryMismatch
from core.handoff import AgentAddress, DevicePath, Location, PoolAccess


class Lane(Enum):
    """The medium that carries the bytes."""

    UNKNOWN = "unknown"
    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda_ipc"
    STAGED = "staged"  # between devices through host memory
    RDMA = "RDMA"
    TCP = "TCP"


class PathState(Enum):
    CONNECTING = "connecting"  # no message from the peer yet, or the first measurement runs
    FINE = "fine"
    SLOW = "slow"  # far below the expected speed
    FALLBACK = "fallback"  # TCP or staging, although a faster lane exists
    UNREACHABLE = "unreachable"  # no message came from the peer after connecting
    REFUSED = "refused"  # the KV layouts cannot be translated, or no path leads between the two memories; final


BROKEN = frozenset({PathState.SLOW, PathState.FALLBACK, PathState.UNREACHABLE, PathState.REFUSED})


@dataclass(frozen=True, slots=True)
class PathStatus:
    """One path, as measured by the reading worker. 0 = not known."""

    peer: str  # name of the agent at the owner
    state: PathState
    lane: Lane = Lane.UNKNOWN
    bytes_per_s: float = 0.0
    expected_bytes_per_s: float = 0.0
    latency_s: float = 0.0  # of a notification there and back
    detail: str = ""  # of UNREACHABLE and REFUSED

    def __str__(self) -> str:
        if self.detail:
            return f"{self.state.value}: {self.detail}"
        speed = f", {self.bytes_per_s / 1e9:.3g} GB/s" if self.bytes_per_s else ""
        promise = f" of {self.expected_bytes_per_s / 1e9:.3g}" if speed and self.expected_bytes_per_s else ""
        return f"{self.state.value}: {self.lane.value}{speed}{promise}, {self.latency_s * 1e6:.0f} us there and back"


# ---- events for a worker's machine, from a router


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A worker of the other pool, to read from or to be read by."""

    peer: AgentAddress
    is_owner: bool  # this worker reads from the peer


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A worker has left the fleet."""

    name: str


# ---- policy


def device_path(reader: PoolAccess, owner: PoolAccess, on_one_machine: bool) -> DevicePath | None:
    """How a read moves between two pools of which one is on a device; None where both are in host memory.

    Raises `MemoryMismatch` where no path leads from one to the other.
    """
    if reader.device is None and owner.device is None:
        return None
    common = reader.paths & owner.paths
    if reader.device is not None and owner.device is not None:
        if DevicePath.MAPPED in common and on_one_machine:
            return DevicePath.MAPPED
        if DevicePath.DIRECT in common:
            return DevicePath.DIRECT
    if DevicePath.STAGED in reader.paths and (owner.device is None or DevicePath.STAGED in owner.paths):
        return DevicePath.STAGED
    raise MemoryMismatch(reader, owner, 'set [transfer] device_path = "staged" for both pools')


def refuse_memory(reader: AgentAddress, owner: AgentAddress) -> None:
    """Raise `MemoryMismatch` where `reader` cannot read the pool of `owner`."""
    device_path(reader.access, owner.access, reader.location.machine == owner.location.machine)


def lane_of(seen: Lane, ours: Location, theirs: Location) -> Lane:
    """The lane of a path. `seen` is what the transport names, or TCP or RDMA if a network device counted the bytes,
    else UNKNOWN.

    Bytes between two agents of one machine that no device counted moved through memory.
    """
    if seen is not Lane.UNKNOWN or ours.machine != theirs.machine:
        return seen
    return Lane.CUDA_IPC if ours.on_gpu and theirs.on_gpu else Lane.SHARED_MEMORY


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
    if status.lane is Lane.STAGED and on_one_machine and between_gpus:
        return PathState.FALLBACK
    if status.bytes_per_s and status.bytes_per_s < slow_share * status.expected_bytes_per_s:
        return PathState.SLOW
    return PathState.FINE
