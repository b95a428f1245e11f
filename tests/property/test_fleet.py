"""FleetMachine under random events. tests/unit/fleet/test_machine.py tests its rules one by one."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.fleet_control import SlotState
from core.lifecycle import ServiceRole
from core.machine import Tick
from fleet.law import events
from fleet.law.claims import Claims
from fleet.law.events import MachineId, Member
from fleet.law.machine import FleetMachine
from fleet.law.slots import OTHER_ROLE

LIVE = ("serving", "switching", "draining")


class FleetUnderRandomEvents(RuleBasedStateMachine):
    """After any event that a shell can report, every invariant holds, and each slot has at most one live start."""

    def __init__(self) -> None:
        super().__init__()
        config = ClusterConfig(max_workers=3, num_routers=2)
        self.fleet_rules = events.FleetRules(Claims(config), drain_timeout_s=5.0, router_drain_timeout_s=2.0)
        self.fleet = FleetMachine(self.fleet_rules)
        self.now = 0.0
        self.alive: dict[Member, str] = {}  # -> placing | starting | serving | switching | draining
        self.roles: dict[Member, ServiceRole] = {}  # of the services that have started
        self.dead: list[Member] = []
        self.published: dict[Member, events.PublishFleet] = {}  # the newest lists of each router
        self.configuring: list[events.ConfigureService] = []  # changes on their way to services
        self.ended = False
        self.send(Tick())

    @initialize(serves=st.booleans())
    def the_fleet_may_have_started(self, serves: bool) -> None:
        if serves:
            self.once_everything_succeeds()

    def send(self, event: object) -> None:
        for action in self.fleet.handle(event, self.now):  # type: ignore[arg-type]
            match action:
                case events.StartService(member=member):
                    assert member.name not in [other.name for other in self.alive]
                    assert not self.ended
                    self.alive[member] = "placing"
                case events.ConfigureService(member):
                    assert self.alive[member] == "serving"
                    assert not self.fleet.status(self.now).rolling
                    self.configuring.append(action)
                case events.DrainService(member):
                    assert self.alive[member] == "serving"
                    if self.ended and member.role is not ServiceRole.ROUTER:
                        assert not [other for other in self.alive if other.role is ServiceRole.ROUTER]
                    self.alive[member] = "draining"
                case events.SwitchService(member):
                    assert self.alive[member] == "serving"
                    assert not self.ended
                    self.alive[member] = "switching"
                case events.KillService(member):
                    self.mark_dead(member)
                case events.PublishFleet(router, workers, routers):
                    assert self.alive[router] in LIVE
                    assert all(self.alive[serving.member] in LIVE for serving in (*workers, *routers))
                    self.published[router] = action
                case events.FleetStopped():
                    assert not self.alive

    def mark_dead(self, member: Member) -> None:
        del self.alive[member]
        self.published.pop(member, None)
        self.dead.append(member)

    def member_in(self, data: st.DataObject, *states: str) -> Member | None:
        members = [member for member, state in self.alive.items() if state in states]
        return data.draw(st.sampled_from(members)) if members else None

    @rule(sizes=st.dictionaries(st.sampled_from(ServiceRole), st.integers(1, 3)), empty=st.booleans())
    def scale(self, sizes: dict[ServiceRole, int], empty: bool) -> None:
        self.send(events.ScaleTo(sizes | ({ServiceRole.DECODE: 0} if empty else {})))

    @rule(data=st.data(), machine=st.sampled_from("abc"))
    def a_place_is_found(self, data: st.DataObject, machine: str) -> None:
        if member := self.member_in(data, "placing"):
            self.alive[member] = "starting"
            self.send(events.ServicePlaced(member, MachineId(machine, "")))

    @rule(machine=st.sampled_from("abc"), in_s=st.none() | st.floats(0.0, 100.0))
    def a_machine_leaves(self, machine: str, in_s: float | None) -> None:
        self.send(events.MachineLeaving(MachineId(machine, ""), in_s))

    @rule(event=st.sampled_from(["roll", "stop"]))
    def an_operator_rolls(self, event: str) -> None:
        with contextlib.suppress(InvalidRequest):  # there is a roll already, or none to stop
            self.send(events.NewConfig(self.fleet_rules, restarts=True) if event == "roll" else events.StopRoll())

    @rule()
    def an_operator_changes_live_options(self) -> None:
        rolling, before = self.fleet.status(self.now).rolling, self.fleet.status(self.now).revision
        with contextlib.suppress(InvalidRequest):
            self.send(events.NewConfig(self.fleet_rules, False, "a change"))
        assert (self.fleet.status(self.now).revision > before) == (not rolling)

    @precondition(lambda self: self.configuring)
    @rule(data=st.data())
    def a_service_takes_a_change(self, data: st.DataObject) -> None:
        """In any order, and also when the service does not serve any more."""
        taken = self.configuring.pop(data.draw(st.integers(0, len(self.configuring) - 1)))
        self.send(events.ServiceConfigured(taken.member, taken.revision))

    @rule(data=st.data())
    def an_operator_switches_a_role(self, data: st.DataObject) -> None:
        serving = [m for m, state in self.alive.items() if state == "serving" and self.roles[m] in OTHER_ROLE]
        if not serving:
            return
        member, before = data.draw(st.sampled_from(serving)), dict(self.alive)
        with contextlib.suppress(InvalidRequest):  # a roll, a machine that leaves, or the limit of a pool
            self.send(events.SwitchRole(member.name, OTHER_ROLE[self.roles[member]]))
            assert self.alive == before | {member: "switching"}, "another service starts or stops"

    @rule(data=st.data())
    def a_start_succeeds(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "starting"):
            self.starts_to_serve(member)

    def starts_to_serve(self, member: Member) -> None:
        self.alive[member], self.roles[member] = "serving", member.role
        self.send(events.ServiceStarted(member, f"id-{member.start}", f"host:{member.start}"))

    @rule(data=st.data())
    def a_switch_succeeds(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "switching"):
            self.switches(member)

    def switches(self, member: Member) -> None:
        self.alive[member], self.roles[member] = "serving", OTHER_ROLE[self.roles[member]]
        self.send(events.RoleSwitched(member))

    @rule(data=st.data())
    def a_switch_fails(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "switching"):
            self.mark_dead(member)
            self.send(events.SwitchFailed(member, "still has work"))

    @rule(data=st.data(), permanent=st.booleans())
    def a_start_fails(self, data: st.DataObject, permanent: bool) -> None:
        if member := self.member_in(data, "starting"):
            self.mark_dead(member)
            self.send(events.StartFailed(member, "no", permanent))

    @rule(data=st.data())
    def a_process_dies(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "placing", "starting", *LIVE):
            self.mark_dead(member)
            self.send(events.ServiceDied(member, "killed"))

    @rule(data=st.data())
    def a_drain_ends(self, data: st.DataObject) -> None:
        if member := self.member_in(data, "draining"):
            self.mark_dead(member)
            self.send(events.Drained(member))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def a_dead_member_reports_its_death(self, data: st.DataObject) -> None:
        self.send(events.ServiceDied(data.draw(st.sampled_from(self.dead)), "late"))

    @rule(seconds=st.floats(0.0, 200.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    @invariant()
    def every_rule_holds(self) -> None:
        self.fleet.check()

    @invariant()
    def as_many_services_are_wanted_as_do_not_drain_or_replace_another(self) -> None:
        for role, wanted in self.fleet.wanted.items():
            present = [slot for slot in self.fleet.status(self.now).slots if slot.role is role]
            staying = [slot for slot in present if slot.state is not SlotState.DRAINING]
            leaving = [slot for slot in staying if slot.state is SlotState.SERVING and slot.reason]
            assert len(staying) - len(leaving) <= wanted <= len(staying)

    @invariant()
    def all_routers_have_the_same_lists_of_everything_that_serves(self) -> None:
        live = {member for member, state in self.alive.items() if state in LIVE}
        routers = {member for member in live if member.role is ServiceRole.ROUTER}
        assert self.published.keys() == routers
        for publication in self.published.values():
            assert {serving.member for serving in publication.workers} == live - routers
            assert {serving.member for serving in publication.routers} == routers
            for serving in (*publication.workers, *publication.routers):
                assert serving.draining == (self.alive[serving.member] != "serving")
                assert serving.role is self.roles[serving.member]

    def once_everything_succeeds(self) -> None:
        """Every start finds a machine and serves, every drain ends, and time passes, until nothing changes."""
        for _ in range(500):
            while self.configuring:
                taken = self.configuring.pop(0)
                self.send(events.ServiceConfigured(taken.member, taken.revision))
            for member, state in list(self.alive.items()):
                if state == "placing":
                    self.alive[member] = "starting"
                    self.send(events.ServicePlaced(member, MachineId("new", "")))
                elif state == "starting":
                    self.starts_to_serve(member)
                elif state == "switching":
                    self.switches(member)
                elif state == "draining":
                    self.mark_dead(member)
                    self.send(events.Drained(member))
                else:
                    continue
                break
            else:
                deadline = self.fleet.next_deadline()
                if deadline is None:
                    return
                self.now = max(self.now, deadline)
                self.send(Tick())
            self.fleet.check()
        raise AssertionError("the fleet does not come to rest")

    def teardown(self) -> None:
        """From any state, the fleet comes to rest as wanted; and no member is left after a shutdown."""
        self.once_everything_succeeds()
        status = self.fleet.status(self.now)
        assert not status.rolling
        assert {slot.revision for slot in status.slots} == {status.revision}
        assert {slot.state for slot in status.slots} == {SlotState.SERVING}
        for role, wanted in status.wanted.items():
            assert sum(slot.role is role for slot in status.slots) == wanted
        self.ended = True
        self.send(events.Shutdown())
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
