"""The measured path between two transfer agents.

kv_transfer/protocol/path_verdict.py judges a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from core.handoff import AgentAddress


class Lane(Enum):
    """The medium that carries the bytes."""

    UNKNOWN = "unknown"
    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda_ipc"
    RDMA = "RDMA"
    TCP = "TCP"


class PathState(Enum):
    CONNECTING = "connecting"  # no message from the peer yet, or the first measurement runs
    FINE = "fine"
    SLOW = "slow"  # far below the expected speed
    FALLBACK = "fallback"  # TCP or an unknown lane, although a faster lane exists
    UNREACHABLE = "unreachable"  # no message came from the peer after connecting
    REFUSED = "refused"  # the KV layouts cannot be translated; final


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
