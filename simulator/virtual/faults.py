"""The faults of a simulated fleet: of its network, its reads, its engines, its workers and its routers."""

from __future__ import annotations

from dataclasses import dataclass

PROBED_BYTES_PER_S = 5e9  # of a probe without faults


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    delay_s: float = 0.0005  # typical
    slow_pair_share: float = 0.0  # share of pairs with a delay SLOWNESS times as long
    loss: float = 0.0  # probability for a notification
    doubling: float = 0.0  # likewise


@dataclass(frozen=True, slots=True)
class ReadFaults:
    seconds_per_block: float = 0.0005
    slow: float = 0.0  # probability that a read takes between half and six times its time limit
    broken: float = 0.0  # ... that a read fails
    corrupted: float = 0.0  # ... that a bit of a block flips during the read


@dataclass(frozen=True, slots=True)
class DiskFaults:
    seconds_per_block: float = 0.0002
    failed: float = 0.0  # probability that a read or a write fails
    damaged: float = 0.0  # ... that a written block is not found later
    hung: float = 0.0  # ... that a read ends long after its limit


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """Of the engine of a vLLM worker."""

    death: float = 0.0  # probability that a step ends the engine
    hang: float = 0.0  # ... that a step never ends
    lost_load: float = 0.0  # ... that the KV of a hand-off cannot be loaded


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind`: dies | vanishes (a silent death) | drains | stops (SIGSTOP) | loses its report stream | loses its token
    stream."""

    kind: str
    worker_id: str
    at: float
    duration_s: float  # until the worker restarts or resumes


@dataclass(frozen=True, slots=True)
class RouterDeath:
    router: int  # place in the list of routers
    at: float
    duration_s: float  # until the next router serves at its address
