"""FleetMachine under random events. tests/unit/fleet/test_machine.py tests its rules one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.config import ClusterConfig
from core.machine import Tick
from fleet.events import (
    Drained,
    DrainService,
    FleetStopped,
    KillService,
    Member,
    PublishFleet,
    ScaleTo,
    ServiceDied,
    ServiceStarted,
    Shutdown,
    StartFailed,
    StartService,
)
from fleet.machine import FleetMachine


class FleetUnderRandomEvents(RuleBasedStateMachine):
    """After any event that a shell can report, every invariant holds, and each slot has at most one live start."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetMachine(ClusterConfig(max_workers=3), drain_timeout_s=5.0, router_drain_timeout_s=2.0)
        self.now = 0.0
        self.alive: dict[Member, str] = {}  # -> starting | serving | draining
        self.dead: list[Member] = []
        self.ended = False
        self.send(Tick())

    def send(self, event: object) -> None:
        for action in self.fleet.handle(event, self.now):  # type: ignore[arg-type]
            match action:
                case StartService(member):
                    assert member.name not in [other.name for other in self.alive]
                    assert not self.ended
                    self.alive[member] = "starting"
                case DrainService(member):
                    assert self.alive[member] == "serving"
                    self.alive[member] = "draining"
                case KillService(member):
                    self.mark_dead(member)
                case PublishFleet(router, workers):
                    assert self.alive[router] != "starting"
                    assert all(self.alive[serving.member] != "starting" for serving in workers)
                case FleetStopped():
                    assert not self.alive

    def mark_dead(self, member: Member) -> None:
        del self.alive[member]
        self.dead.append(member)

    def member_in(self, data: st.DataObject, *states: str) -> Member | None:
        members = [member for member, state in self.alive.items() if state in states]
        return data.draw(st.sampled_from(members)) if members else None

    @rule(prefill=st.none() | st.integers(0, 3), decode=st.none() | st.integers(0, 3))
    def scale(self, prefill: int | None, decode: int | None) -> None:
        self.send(ScaleTo(prefill, decode))

    @rule(data=st.data())
    def a_start_succeeds(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "starting"):
            self.alive[member] = "serving"
            self.send(ServiceStarted(member, f"id-{member.start}", f"host:{member.start}"))

    @rule(data=st.data(), permanent=st.booleans())
    def a_start_fails(self, data: st.DataObject, permanent: bool) -> None:
        if member := self.member_in(data, "starting"):
            self.mark_dead(member)
            self.send(StartFailed(member, "no", permanent))

    @rule(data=st.data())
    def a_process_dies(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "starting", "serving", "draining"):
            self.mark_dead(member)
            self.send(ServiceDied(member, "killed"))

    @rule(data=st.data())
    def a_drain_ends(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "draining"):
            self.mark_dead(member)
            self.send(Drained(member))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def a_dead_member_reports_its_death(self, data: st.DataObject) -> None:
        self.send(ServiceDied(data.draw(st.sampled_from(self.dead)), "late"))

    @rule(seconds=st.floats(0.0, 200.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    @invariant()
    def every_rule_holds(self) -> None:
        self.fleet.check()

    def teardown(self) -> None:
        """From any state, no member is left after a shutdown and the last deadline."""
        self.ended = True
        self.send(Shutdown())
        for _ in range(50):
            deadline = self.fleet.next_deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.send(Tick())
            self.fleet.check()
        assert self.alive == {}


FleetUnderRandomEvents.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleetUnderRandomEvents = FleetUnderRandomEvents.TestCase
