"""Drives a FleetMachine by hand, for tests of its rules."""

from __future__ import annotations

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from core.machine import Tick
from fleet.law.claims import Claims
from fleet.law.events import (
    FleetAction,
    FleetAdopted,
    FleetMessage,
    FleetRules,
    MachineId,
    MachineLeaving,
    Member,
    PublishFleet,
    ServiceDied,
    ServicePlaced,
    ServiceStarted,
    StartService,
)
from fleet.law.machine import FleetMachine

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER


class Fleet:
    """A machine, its clock, its newest actions and the members that it has started."""

    def __init__(self, *adopted: tuple[MachineId, ServiceStarted], **options: object) -> None:
        config = ClusterConfig(max_workers=4, start_timeout_s=50.0, restart_backoff_s=1.0, **options)  # type: ignore[arg-type]
        self.rules = FleetRules(Claims(config), drain_timeout_s=30.0, router_drain_timeout_s=10.0)
        self.machine = FleetMachine(self.rules)
        self.now = 100.0
        self.members: dict[str, Member] = {}
        if adopted:
            self.members |= {started.member.name: started.member for _, started in adopted}
            self.send(FleetAdopted(adopted))
        self.send(Tick())

    def send(self, event: object, after_s: float = 0.0) -> list[FleetAction]:
        self.now += after_s
        self.actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        self.machine.check()
        for action in self.actions:
            if isinstance(action, StartService):
                self.members[action.member.name] = action.member
        return self.actions

    def placed(self, name: str, machine: str = "m-0") -> list[FleetAction]:
        return self.send(ServicePlaced(self.members[name], MachineId(machine, f"{machine}.local")))

    def started(self, name: str, address: str = "", machine: str = "m-0") -> list[FleetAction]:
        member = self.members[name]
        self.placed(name, machine)
        return self.send(ServiceStarted(member, f"{name}-{member.start:x}", address or f"host:{member.start}"))

    def leaves(self, machine: str, in_s: float | None) -> list[FleetAction]:
        return self.send(MachineLeaving(MachineId(machine, f"{machine}.local"), in_s))

    def died(self, name: str, after_s: float = 0.0) -> list[FleetAction]:
        return self.send(ServiceDied(self.members[name], "killed"), after_s)

    def all_started(self) -> Fleet:
        for name in list(self.members):
            self.started(name)
        return self

    def revisions(self) -> dict[str, int]:
        return {slot.name: slot.revision for slot in self.machine.status(self.now).slots}

    def state_of(self, name: str) -> tuple[str, str]:
        """State and reason."""
        (slot,) = [slot for slot in self.machine.status(self.now).slots if slot.name == name]
        return slot.state.value, slot.reason

    def printed(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, FleetMessage) and action.printed]

    def of(self, kind: type) -> list[FleetAction]:
        return [action for action in self.actions if isinstance(action, kind)]

    def names(self, kind: type) -> list[str]:
        return [action.member.name for action in self.of(kind)]  # type: ignore[union-attr]

    def published(self) -> list[str] | None:
        """The newest list of workers that a router has received."""
        lists = [action.workers for action in self.actions if isinstance(action, PublishFleet)]
        return [serving.member.name for serving in lists[-1]] if lists else None

    def published_as_draining(self) -> list[str]:
        """Those of the newest list that get no new call."""
        lists = [action.workers for action in self.actions if isinstance(action, PublishFleet)]
        return [serving.member.name for serving in lists[-1] if serving.draining]
