"""The events that FleetMachine (fleet/machine.py) takes, and the actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import PoolSizes


@dataclass(frozen=True, slots=True)
class Member:
    """One start of one slot. `start` numbers all starts of the fleet."""

    role: ServiceRole
    ordinal: int
    start: int

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Serving:
    """A started member, as the routers learn of it."""

    member: Member
    service_id: str
    address: str  # host:port
    draining: bool = False  # set for routers only: a worker itself reports that it drains


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """The pool sizes to change. A role without an entry keeps its size."""

    sizes: PoolSizes


@dataclass(frozen=True, slots=True)
class ServiceStarted:
    member: Member
    service_id: str
    address: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    member: Member
    reason: str
    permanent: bool  # the same start would fail every time


@dataclass(frozen=True, slots=True)
class ServiceDied:
    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    member: Member


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Drain every service; `FleetStopped` follows."""


FleetEvent = ScaleTo | ServiceStarted | StartFailed | ServiceDied | Drained | Shutdown | Tick


@dataclass(frozen=True, slots=True)
class StartService:
    member: Member


@dataclass(frozen=True, slots=True)
class DrainService:
    """Drain and stop the service, then end its process. `Drained` or `ServiceDied` follows, else `KillService`."""

    member: Member
    timeout_s: float


@dataclass(frozen=True, slots=True)
class KillService:
    member: Member


@dataclass(frozen=True, slots=True)
class PublishFleet:
    """Send this router the lists of workers and routers: the serving ones, and the draining ones until they end."""

    router: Member
    workers: tuple[Serving, ...]
    routers: tuple[Serving, ...]


@dataclass(frozen=True, slots=True)
class FleetMessage:
    """One line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class FleetReady:
    """Every wanted service serves, for the first time."""


@dataclass(frozen=True, slots=True)
class FleetFailed:
    """The fleet cannot start, or its supervisor has failed. Answer with `Shutdown`."""

    reason: str


@dataclass(frozen=True, slots=True)
class FleetStopped:
    """No service is left after `Shutdown`."""


FleetAction = (
    StartService | DrainService | KillService | PublishFleet | FleetMessage | FleetReady | FleetFailed | FleetStopped
)
