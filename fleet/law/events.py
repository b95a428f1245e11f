"""The events that FleetMachine (fleet/law/machine.py) takes, and the actions that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import Endpoint, PoolSizes
from fleet.law.claims import Claims


@dataclass(frozen=True, slots=True)
class MachineId:
    """A machine of the fleet."""

    name: str  # unique
    host: str  # its address, as in `fleet.host.service_host.Placement`

    def __str__(self) -> str:
        return self.host or "this machine"


@dataclass(frozen=True, slots=True)
class SlotId:
    """A numbered place of the fleet. Its name stays if the role of its service changes."""

    pool: ServiceRole  # for which the slot was added
    number: int

    def __str__(self) -> str:
        return f"{self.pool.value}-{self.number}"


@dataclass(frozen=True, slots=True)
class Member:
    """One start of one slot. `start` numbers all starts of the fleet; 0 = none yet. It stays the same member when its
    role changes."""

    slot: SlotId
    role: ServiceRole = field(compare=False)
    start: int

    @property
    def name(self) -> str:
        return str(self.slot)

    @property
    def ordinal(self) -> int:
        return self.slot.number


@dataclass(frozen=True, slots=True)
class Serving:
    """A started member, as the routers learn of it."""

    member: Member
    role: ServiceRole  # until a switch of the role has ended, the one before
    service_id: str
    address: str  # host:port
    draining: bool = False

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.service_id, self.address, self.role, draining=self.draining)


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """The pool sizes to change. A role without an entry keeps its size."""

    sizes: PoolSizes
    first_to_leave: tuple[str, ...] = ()  # names of slots of a shrinking pool, in this order; then the newest


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Give the worker of a slot the other role."""

    slot: str
    role: ServiceRole


@dataclass(frozen=True, slots=True)
class ServicePlaced:
    """The process of the service runs on this machine. `ServiceStarted` or `StartFailed` follows, or `ServiceDied`."""

    member: Member
    machine: MachineId


@dataclass(frozen=True, slots=True)
class ServiceStarted:
    member: Member
    service_id: str
    address: str
    version: str = ""  # of its software


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
class ServiceConfigured:
    """The service has taken the live options of this revision."""

    member: Member
    revision: int


@dataclass(frozen=True, slots=True)
class Drained:
    member: Member


@dataclass(frozen=True, slots=True)
class RoleSwitched:
    member: Member


@dataclass(frozen=True, slots=True)
class SwitchFailed:
    """The worker has work left. Its process is killed."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class MachineLeaving:
    """The machine takes no new service and ends in `in_s` seconds; None = when its services have left."""

    machine: MachineId
    in_s: float | None


@dataclass(frozen=True, slots=True)
class FleetRules:
    """The rules for all services in one revision of the config."""

    claims: Claims
    drain_timeout_s: float  # of a worker
    router_drain_timeout_s: float
    role_option: str = ""  # the option that keeps workers from changing their roles

    @property
    def config(self) -> ClusterConfig:
        return self.claims.config

    def drain_limit_s(self, role: ServiceRole) -> float:
        return self.router_drain_timeout_s if role is ServiceRole.ROUTER else self.drain_timeout_s


@dataclass(frozen=True, slots=True)
class RollLeft:
    """A roll that an earlier supervisor has begun."""

    leaves: int  # revision of the services that have not rolled
    can_stop: bool  # a failure restores `leaves`
    rolled: frozenset[Member]


@dataclass(frozen=True, slots=True)
class FleetAdopted:
    """Before the first `Tick`: the services that an earlier supervisor has started, each with its machine. No two have
    one slot."""

    services: tuple[tuple[MachineId, ServiceStarted], ...]
    sizes: PoolSizes = field(default_factory=dict)  # empty: those of the config, or larger if more services are there
    rules: Mapping[int, FleetRules] = field(default_factory=dict)  # by revision; empty: those of the start
    revision: int = 1  # of new starts
    roll: RollLeft | None = None

    def revision_of(self, member: Member) -> int:
        return self.revision if self.roll is None or member in self.roll.rolled else self.roll.leaves


@dataclass(frozen=True, slots=True)
class NewConfig:
    """Give every service the next revision of the config."""

    rules: FleetRules
    restarts: bool  # by a roll; else it differs in live options only
    changes: str = ""  # names of options, for everybody who may list events


@dataclass(frozen=True, slots=True)
class StopRoll:
    """Restore the revision before the roll."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Drain every service; `FleetStopped` follows."""


MemberEvent = (
    ServicePlaced
    | ServiceStarted
    | StartFailed
    | ServiceConfigured
    | ServiceDied
    | Drained
    | RoleSwitched
    | SwitchFailed
)
FleetEvent = MemberEvent | FleetAdopted | ScaleTo | SwitchRole | MachineLeaving | NewConfig | StopRoll | Shutdown | Tick


@dataclass(frozen=True, slots=True)
class StartService:
    """Place the service on a machine, then start it. `ServicePlaced` or `ServiceDied` follows."""

    member: Member
    revision: int  # of the config, from 1
    replaces: Member | None = None  # serves until this service does


@dataclass(frozen=True, slots=True)
class ConfigureService:
    """Give the service the live options of this revision. `ServiceConfigured` follows, or `ServiceDied`."""

    member: Member
    revision: int


@dataclass(frozen=True, slots=True)
class DrainService:
    """Drain and stop the service, then end its process. `Drained` or `ServiceDied` follows, else `KillService`.

    A worker drains when every router knows: else a router may send it a call after the end of its process.
    """

    member: Member
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SwitchService:
    """Drain the worker, then let it serve in the role of `member`. `RoleSwitched`, `SwitchFailed` or `ServiceDied`
    follows, else `KillService`. It drains when every router knows, as with `DrainService`."""

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
    """A note for the operator: one of `tandem events`, and if `printed` also a line of `tandem serve`."""

    subject: str  # a slot, a machine or "fleet"
    what: str
    reason: str = ""
    printed: bool = True

    @property
    def text(self) -> str:
        return f"{self.subject} {self.what}" + (f": {self.reason}" if self.reason else "")


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
    StartService
    | ConfigureService
    | DrainService
    | SwitchService
    | KillService
    | PublishFleet
    | FleetMessage
    | FleetReady
    | FleetFailed
    | FleetStopped
)
