"""The shell of a FleetMachine in virtual time.

    events --> FleetMachine --actions--> FleetShell --start, drain, switch, end, publish--> Workers, Routers
                    ^                        |
                    +-- ServiceStarted, Drained, RoleSwitched, ServiceDied, ...

Routers may be left out: `NoRouters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, assert_never

from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import Endpoint
from fleet.law.events import (
    ConfigureService,
    Drained,
    DrainService,
    FleetAction,
    FleetEvent,
    FleetFailed,
    FleetMessage,
    FleetReady,
    FleetRules,
    FleetStopped,
    KillService,
    MachineId,
    Member,
    PublishFleet,
    RoleSwitched,
    ServiceConfigured,
    ServiceDied,
    ServicePlaced,
    ServiceStarted,
    StartFailed,
    StartService,
    SwitchFailed,
    SwitchService,
)
from fleet.law.machine import FleetMachine
from simulator.virtual.machine_timer import MachineTimer
from simulator.virtual.world import World

POLL_S = 0.1  # of a draining service


class Services(Protocol):
    """The processes of a role, by their service ids."""

    def start_service(self, service_id: str, member: Member) -> None: ...

    def drain_service(self, service_id: str) -> None: ...

    def is_idle(self, service_id: str) -> bool: ...

    def end_service(self, service_id: str, killed: bool) -> None: ...


class Workers(Services, Protocol):
    def switch_service(self, service_id: str) -> None:
        """An idle worker takes the other role."""

    def publish(self, router: Member, workers: Sequence[Endpoint]) -> None:
        """Tell a router."""


class NoRouters:
    """Nothing is left to do when a router drains."""

    def start_service(self, service_id: str, member: Member) -> None: ...

    def drain_service(self, service_id: str) -> None: ...

    def is_idle(self, service_id: str) -> bool:
        del service_id
        return True

    def end_service(self, service_id: str, killed: bool) -> None: ...


class FleetShell:
    """`start_s` says how long a start takes. After `publish_s`, every router knows the newest lists."""

    def __init__(
        self,
        world: World,
        rules: FleetRules,
        workers: Workers,
        start_s: Callable[[Member], float],
        routers: Services | None = None,
        publish_s: float = 0.0,
    ) -> None:
        self.machine = FleetMachine(rules)
        self.num_switches = 0
        self.ids: dict[Member, str] = {}  # of services that serve, drain or switch
        self._world, self._workers, self._start_s, self._publish_s = world, workers, start_s, publish_s
        self._routers = routers or NoRouters()
        self._timer = MachineTimer(world, self.machine, self.post)

    def start(self) -> None:
        """Start the first services."""
        self.post(Tick())

    def post(self, event: FleetEvent) -> None:
        """Raises `InvalidRequest` as the machine does."""
        actions = self.machine.handle(event, self._world.now)
        if self._world.is_checked:
            self.machine.check()
            self._world.note(f"fleet <- {event}")
        for action in actions:
            self._perform(action)
        self._timer.update()

    def died(self, service_id: str) -> None:
        """The process of a service has ended by itself."""
        member = next((member for member, known in self.ids.items() if known == service_id), None)
        if member is not None:
            del self.ids[member]
            self.post(ServiceDied(member, "its process has ended"))

    # ---- inside

    def _services(self, member: Member) -> Services:
        return self._routers if member.role is ServiceRole.ROUTER else self._workers

    def _perform(self, action: FleetAction) -> None:
        after = self._world.after
        match action:
            case StartService(member):
                after(0.0, partial(self._place, member))
                after(self._start_s(member), partial(self._serve, member))
            case ConfigureService(member, revision):
                after(0.0, partial(self.post, ServiceConfigured(member, revision)))
            case PublishFleet(router, workers, _):
                self._workers.publish(router, [serving.endpoint for serving in workers])
            case DrainService(member, timeout_s) | SwitchService(member, timeout_s):
                ends_at = self._world.now + timeout_s
                after(self._publish_s, partial(self._drain, member, ends_at, isinstance(action, SwitchService)))
            case KillService(member):
                self._end(member, killed=True)
            case FleetMessage() | FleetReady() | FleetFailed() | FleetStopped():
                pass  # for operators
            case _:
                assert_never(action)

    def _place(self, member: Member) -> None:
        self.post(ServicePlaced(member, self.machine_for(member)))

    def machine_for(self, member: Member) -> MachineId:
        """One of its own, unless the fleet says otherwise."""
        return MachineId(member.name, "")

    def start_fails(self, member: Member) -> bool:
        """Never, unless the fleet says otherwise."""
        del member
        return False

    def _serve(self, member: Member) -> None:
        if not self.machine.has(member):
            return  # not wanted any more
        if self.start_fails(member):
            self.post(StartFailed(member, "no", permanent=False))
            return
        is_router = member.role is ServiceRole.ROUTER  # whose name stays
        service_id = self.ids[member] = member.name if is_router else f"{member.name}.{member.start:04x}"
        self._services(member).start_service(service_id, member)
        self.post(ServiceStarted(member, service_id, f"{service_id}:0"))

    def _drain(self, member: Member, ends_at: float, is_switch: bool) -> None:
        if member in self.ids:
            self._services(member).drain_service(self.ids[member])
            self._world.after(POLL_S, partial(self._end_drained, member, ends_at, is_switch))

    def _end_drained(self, member: Member, ends_at: float, is_switch: bool) -> None:
        service_id = self.ids.get(member)
        if service_id is None:
            return  # killed, or dead
        is_idle = self._services(member).is_idle(service_id)
        if not is_idle and self._world.now < ends_at:
            self._world.after(POLL_S, partial(self._end_drained, member, ends_at, is_switch))
        elif is_idle and is_switch:
            self.num_switches += 1
            self._workers.switch_service(service_id)
            self.post(RoleSwitched(member))
        else:
            self._end(member, killed=not is_idle)
            self.post(SwitchFailed(member, "still has work") if is_switch else Drained(member))

    def _end(self, member: Member, killed: bool) -> None:
        service_id = self.ids.pop(member, None)
        if service_id is not None:
            self._world.counts["killed by its fleet"] += killed
            self._services(member).end_service(service_id, killed)
