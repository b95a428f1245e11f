"""What is said to the fleet's machine (fleet/machine.py) and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from core.lifecycle import ServiceRole
from core.machine import Tick


@dataclass(frozen=True, slots=True)
class Member:
    """One start of one slot. `start` grows by one with every start in the fleet."""

    role: ServiceRole
    ordinal: int
    start: int

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Serving:
    """A member that answers; what the router is told of a worker."""

    member: Member
    service_id: str
    address: str  # host:port


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Sizes wanted from now on; None = as it is."""

    prefill: int | None
    decode: int | None


@dataclass(frozen=True, slots=True)
class ServiceStarted:
    member: Member
    service_id: str
    address: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    member: Member
    reason: str
    permanent: bool  # the same start would fail again


@dataclass(frozen=True, slots=True)
class ServiceDied:
    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    member: Member


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Drain everything; `FleetStopped` follows."""


FleetEvent = ScaleTo | ServiceStarted | StartFailed | ServiceDied | Drained | Shutdown | Tick


@dataclass(frozen=True, slots=True)
class StartService:
    member: Member
    address: str  # where this slot served before and should serve again; empty at its first start


@dataclass(frozen=True, slots=True)
class DrainService:
    """Drain, then stop and end the process. `Drained` or `ServiceDied` follows, or it is killed."""

    member: Member
    timeout_s: float


@dataclass(frozen=True, slots=True)
class KillService:
    member: Member


@dataclass(frozen=True, slots=True)
class PublishFleet:
    """Tell this router which workers there are: the serving ones and, until they are done, the draining ones."""

    router: Member
    workers: tuple[Serving, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """One line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class FleetReady:
    """For the first time everything that is wanted serves."""


@dataclass(frozen=True, slots=True)
class FleetFailed:
    """The fleet cannot come up at all. Said once; `Shutdown` is the answer to it."""

    reason: str


@dataclass(frozen=True, slots=True)
class FleetStopped:
    """After `Shutdown`: nothing is left."""


FleetAction = (
    StartService | DrainService | KillService | PublishFleet | Notice | FleetReady | FleetFailed | FleetStopped
)
