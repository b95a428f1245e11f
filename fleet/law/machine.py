"""The law of the fleet: how many services run, which of them restart, and in which order they stop.

A slot is a numbered place of the fleet with a role (`router-0`, `decode-1`); a member is one start of a slot. The
machine drops every event of a member that is not the newest start of its slot.

    WAITING --StartService--> PLACING --ServicePlaced--> STARTING --ServiceStarted--> SERVING --> DRAINING --> gone
       ^                         |                          |                            |
       +------ ServiceDied ------+-- StartFailed, too slow -+-------- ServiceDied -------+    (a pause that doubles)

Rule 1: the number of slots of a role that do not drain equals the wanted size.
Rule 2: every router learns of a change in the step in which the machine learns of it.
Rule 3: removed slots drain, those that are named first, then the newest. A drain past its time limit is killed.
Rule 4: at shutdown all routers drain before any worker, so that dispatched requests can finish.
Rule 5: at least one router is wanted.
Rule 6: a slot waits for a machine without a time limit, until it is not wanted any more: a killed actor would take
back the demand from which an autoscaler starts a machine. The time limit of a start begins on the machine.
Rule 7: a service on a machine that leaves drains when its replacement serves on another machine, and at the latest
`drain_timeout_s` before the machine ends.
Rule 8: a roll replaces one service at a time (fleet/law/rollout.py).
Rule 9: without a roll, every serving slot gets the newest revision: it differs from that of its start in live options.
Rule 10: a worker may switch its role (fleet/law/role_switch.py). A roll waits for the end of a switch.
Rule 11: services of an earlier supervisor stay, and so do its sizes and its roll (fleet/supervisor/handover.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from core.errors import InvalidRequest
from core.fleet_control import FleetStatus, SlotState
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import SIZE_FIELDS, PoolSizes
from fleet.law import role_switch
from fleet.law.events import (
    Drained,
    FleetAction,
    FleetAdopted,
    FleetEvent,
    FleetFailed,
    FleetMessage,
    FleetReady,
    FleetRules,
    FleetStopped,
    KillService,
    MachineLeaving,
    Member,
    MemberEvent,
    NewConfig,
    PublishFleet,
    RoleSwitched,
    ScaleTo,
    ServiceConfigured,
    ServiceDied,
    ServicePlaced,
    ServiceStarted,
    Shutdown,
    StartFailed,
    StopRoll,
    SwitchFailed,
    SwitchRole,
    SwitchService,
)
from fleet.law.roll import Roll
from fleet.law.rollout import Rollout
from fleet.law.services import DRAIN_GRACE_S, Services
from fleet.law.slots import Slot

LAST_DRAIN_S = 2.0  # of workers at shutdown, when no router sends requests
FIRST_START_ATTEMPTS = 3  # of one slot before the fleet has served at all

NOT_SERVING = (SlotState.WAITING, SlotState.PLACING, SlotState.STARTING)
# The states of a slot in which an event counts. In any other, the machine has decided otherwise meanwhile.
EXPECTED: Mapping[type, tuple[SlotState, ...]] = {
    ServicePlaced: (SlotState.PLACING,),
    ServiceStarted: (SlotState.STARTING,),
    StartFailed: (SlotState.STARTING,),
    ServiceConfigured: (SlotState.SERVING,),
    RoleSwitched: (SlotState.SWITCHING, SlotState.DRAINING),
    SwitchFailed: (SlotState.SWITCHING, SlotState.DRAINING),
    Drained: (SlotState.DRAINING,),
    ServiceDied: tuple(state for state in SlotState if state is not SlotState.WAITING),
}


class FleetMachine:
    """A `core.machine.Machine` over `FleetEvent` and `FleetAction`. The first `Tick` starts everything."""

    def __init__(self, rules: FleetRules) -> None:
        config = rules.config
        self._services = Services(rules)
        self._slots = self._services.slots
        self._rollout = Rollout(self._services)
        self._wanted: dict[ServiceRole, int] = {
            ServiceRole.PREFILL: config.num_prefill,
            ServiceRole.DECODE: config.num_decode,
            ServiceRole.ROUTER: config.num_routers,
        }
        self._published: dict[Member, PublishFleet] = {}  # the newest of each live router
        self._has_served = False  # before the start of this supervisor
        self._was_ready = self._has_failed = self._ending = self._stopped = False

    @property
    def wanted(self) -> PoolSizes:
        """The wanted number of services of every role."""
        return dict(self._wanted)

    @property
    def can_stop_roll(self) -> bool:
        return self._rollout.can_stop

    def has(self, member: Member) -> bool:
        return self._slots.newest(member) is not None

    def status(self, now: float) -> FleetStatus:
        rolling = self._rollout.roll is not None
        return FleetStatus(self.wanted, self._slots.status(now), self._services.revision, rolling)

    def handle(self, event: FleetEvent, now: float) -> list[FleetAction]:
        """Raises `InvalidRequest` for a size out of range, and for a config or a switch out of place.

        Then nothing changes.
        """
        actions = self._record(event, now)
        actions += self._expire(now)
        actions += self._balance(now)
        if not self._ending:
            actions += self._rollout.advance(now) + self._rollout.configure()
        return [*self._publish(), *actions, *self._announce()]

    def next_deadline(self) -> float | None:
        next_due = self._slots.next_due()
        return None if next_due == math.inf else next_due

    def check(self) -> None:
        self._slots.check()
        for role, wanted in self._wanted.items():
            staying = self._slots.staying(role)
            assert self._ending or len(staying) == wanted, f"{len(staying)} slots of {role} for {wanted} wanted"
        assert self._wanted[ServiceRole.ROUTER] >= 1, "no router is wanted"
        assert self._published == self._slots.publications(), "a router has not been told of a change"
        lacking = self._slots.lacking(self._services.revision)
        assert self._ending or self._rollout.roll or not lacking, "a service has an old config"
        assert not (self._stopped and self._slots), "a slot is left after FleetStopped"

    def _record(self, event: FleetEvent, now: float) -> list[FleetAction]:
        match event:
            case FleetAdopted():
                return self._adopt(event, now)
            case ScaleTo():
                return self._scale(event)
            case SwitchRole():
                return self._switch_role(event, now)
            case NewConfig():
                if self._ending:
                    raise InvalidRequest("config", "the fleet stops")
                return self._rollout.take(event)
            case StopRoll():
                return self._rollout.stop(now)
            case MachineLeaving():
                return [] if self._ending else self._leave_machine(event, now)
            case Shutdown():
                self._ending = True
                return []
            case Tick():
                return []
            case _:
                slot = self._slots.newest(event.member)
                if slot is None or slot.state not in EXPECTED[type(event)]:
                    return []
                is_leaving = slot.state is SlotState.DRAINING
                return self._drained(slot, event) if is_leaving else self._follow(slot, event, now)

    def _adopt(self, event: FleetAdopted, now: float) -> list[FleetAction]:
        """Rule 11."""
        services = self._services
        services.rules, services.revision = dict(event.rules) or services.rules, event.revision
        for machine, started in event.services:
            slot = self._slots.restore(started.member, now)
            slot.serve(started, now)
            slot.machine, slot.revision = machine, event.revision_of(started.member)
            services.num_starts = max(services.num_starts, started.member.start)
        for role, wanted in self._wanted.items():
            self._wanted[role] = event.sizes.get(role, max(wanted, len(self._slots.staying(role))))
        self._has_served = bool(event.services)
        found = f"{len(event.services)} serve"
        notes: list[FleetAction] = [FleetMessage("fleet", "goes on with the services of an earlier supervisor", found)]
        if event.roll is not None:
            self._rollout.roll = Roll(services.revision, event.roll.leaves if event.roll.can_stop else None)
            notes.append(FleetMessage("fleet", f"goes on with the roll to config {services.revision}"))
        return notes

    def _scale(self, event: ScaleTo) -> list[FleetAction]:
        limit = self._services.newest_rules.config.max_workers
        for role, size in event.sizes.items():
            least = 1 if role is ServiceRole.ROUTER else 0
            if not least <= size <= limit:
                message = f"must be in [{least}, {limit}] (cluster.max_workers), is {size}"
                raise InvalidRequest(SIZE_FIELDS[role], message)
        changed = {role: size for role, size in event.sizes.items() if size != self._wanted[role]}
        sizes = ", ".join(f"{self._wanted[role]} -> {size} {SIZE_FIELDS[role]}" for role, size in changed.items())
        self._wanted |= changed
        orders = {name: order for order, name in enumerate(event.first_to_leave)}
        for slot in self._slots:
            slot.leave_order = orders.get(slot.member.name)
        return [FleetMessage("fleet", "is scaled", sizes, printed=False)] if changed else []

    def _switch_role(self, event: SwitchRole, now: float) -> list[FleetAction]:
        """Rule 10."""
        if self._ending or self._rollout.roll is not None:
            raise InvalidRequest("role", "the fleet stops" if self._ending else "the fleet rolls; switch afterwards")
        slot = role_switch.find_slot(event, self._slots, self._services.newest_rules)
        before, timeout_s = slot.member.role, self._services.rules[slot.revision].drain_limit_s(event.role)
        actions = self._scale(ScaleTo({before: self._wanted[before] - 1, event.role: self._wanted[event.role] + 1}))
        role_switch.begin(slot, event.role, now, now + timeout_s + DRAIN_GRACE_S)
        switch = SwitchService(slot.member, timeout_s)
        return [*actions, switch, FleetMessage(slot.member.name, slot.reason, printed=False)]

    def _leave_machine(self, event: MachineLeaving, now: float) -> list[FleetAction]:
        """Rule 7. A service that starts there starts again elsewhere."""
        actions: list[FleetAction] = []
        reason = f"{event.machine} leaves"
        for slot in self._slots:
            if slot.machine != event.machine or slot.machine_ends_at is not None:
                continue
            if slot.state is SlotState.STARTING:
                actions += [KillService(slot.member), self._services.start(slot, now)]
                actions.append(FleetMessage(slot.member.name, "starts again elsewhere", reason, printed=False))
            elif slot.state is SlotState.SERVING:
                last_s = self._services.rules[slot.revision].drain_limit_s(slot.member.role) + DRAIN_GRACE_S
                in_s = self._services.newest_rules.config.start_timeout_s + last_s if event.in_s is None else event.in_s
                slot.machine_ends_at = now + in_s
                actions += self._services.replace(slot, now + max(0.0, in_s - last_s), reason, now)
            elif slot.state is SlotState.SWITCHING:
                limit_s = math.inf if event.in_s is None else max(0.0, event.in_s - DRAIN_GRACE_S)
                actions += self._services.leave(slot, reason, now, limit_s)
        return actions

    def _follow(self, slot: Slot, event: MemberEvent, now: float) -> list[FleetAction]:
        """An expected event of a service that does not drain."""
        name = slot.member.name
        match event:
            case ServicePlaced():
                slot.enter(SlotState.STARTING, now, now + self._services.rules[slot.revision].config.start_timeout_s)
                slot.machine = event.machine
                replaced = self._slots.replaced_by(slot)
                if replaced is not None and replaced.machine_ends_at is None:
                    replaced.leave_at = None  # there is room for both
                return [FleetMessage(name, f"starts on {event.machine}", printed=False)]
            case ServiceStarted():
                slot.serve(event, now)
                replaced, slot.replaces = self._slots.replaced_by(slot), None
                left = [] if replaced is None else self._services.leave(replaced, replaced.reason, now)
                return [FleetMessage(name, "serves", printed=self._was_ready and not self._ending), *left]
            case ServiceConfigured():
                if slot.configuring == event.revision:
                    slot.revision = event.revision
                return []
            case StartFailed():
                return self._fail(slot, "did not start", event.reason, now, permanent=event.permanent)
            case ServiceDied():
                return self._fail(slot, "died", event.reason, now)
            case RoleSwitched():
                slot.enter(SlotState.SERVING, now, None)
                return [FleetMessage(name, f"serves as {slot.member.role.value} worker")]
            case SwitchFailed():
                return self._fail(slot, "did not switch", event.reason, now)
            case Drained():
                raise AssertionError(f"{name} has drained and was not told to")
            case _:
                assert_never(event)

    def _drained(self, slot: Slot, event: MemberEvent) -> list[FleetAction]:
        """A service that has drained for its switch leaves instead."""
        self._slots.remove(slot)
        killed: list[FleetAction] = [KillService(slot.member)] if isinstance(event, RoleSwitched) else []
        return [*killed, FleetMessage(slot.member.name, "has drained", printed=not self._ending)]

    def _expire(self, now: float) -> list[FleetAction]:
        """Act on every slot whose deadline has come."""
        actions: list[FleetAction] = []
        for slot in self._slots.due(now):
            if self._slots.newest(slot.member) is None:
                continue  # a failure before it in this loop has removed it
            if slot.leave_at is not None and now >= slot.leave_at:
                replacement = self._slots.replacement_of(slot)
                assert replacement is not None, "check() says so"
                replacement.replaces = None
                actions += self._services.leave(slot, slot.reason, now)
            elif slot.deadline is not None and now >= slot.deadline:
                actions += self._expire_state(slot, now)
        return actions

    def _expire_state(self, slot: Slot, now: float) -> list[FleetAction]:
        name = slot.member.name
        match slot.state:
            case SlotState.WAITING:
                return [] if self._ending else [self._services.start(slot, now)]
            case SlotState.PLACING:
                slot.deadline = None
                return [FleetMessage(name, "waits for a machine", slot.reason, printed=not self._ending)]
            case SlotState.STARTING:
                limit_s = self._services.rules[slot.revision].config.start_timeout_s
                reason = f"no answer within {limit_s:g} s (cluster.start_timeout_s)"
                return [KillService(slot.member), *self._fail(slot, "did not start", reason, now, permanent=True)]
            case SlotState.SWITCHING:
                return [KillService(slot.member), *self._fail(slot, "did not switch", "its drain took too long", now)]
            case SlotState.DRAINING:
                self._slots.remove(slot)
                return [KillService(slot.member), FleetMessage(name, "did not drain in time and was killed")]
            case SlotState.SERVING:
                raise AssertionError(f"{name} serves until a deadline")
            case _:
                assert_never(slot.state)

    def _fail(self, slot: Slot, what: str, reason: str, now: float, permanent: bool = False) -> list[FleetAction]:
        actions: list[FleetAction] = []
        name = slot.member.name
        roll = self._rollout.roll
        if roll is not None and roll.is_failed_by(slot) and not self._ending:
            actions += self._rollout.restore(f"{name} {what}: {reason}", now, failed=slot)
            replaced = self._slots.replaced_by(slot)
            if replaced is not None and replaced.machine_ends_at is None:
                self._slots.remove(slot)
                return actions
        replacement = self._slots.replacement_of(slot)
        if replacement is not None:
            replacement.replaces = None
            self._slots.remove(slot)
            return [*actions, FleetMessage(name, what, f"{reason}; {replacement.member.name} takes its place")]
        pause_s = slot.fail(self._services.newest_rules.config.restart_backoff_s, f"{what}: {reason}", now)
        hopeless = permanent or slot.failures >= FIRST_START_ATTEMPTS
        is_first_start = not (self._was_ready or self._has_served)
        if is_first_start and hopeless and not self._has_failed and not self._ending:
            self._has_failed = True
            actions.append(FleetFailed(f"{name}: {reason}"))
        elif not self._ending:
            actions.append(FleetMessage(name, what, f"{reason}; starting it again in {pause_s:g} s"))
        return actions

    def _balance(self, now: float) -> list[FleetAction]:
        """Rules 1, 3 and 4."""
        if self._ending:
            return self._end(now)
        actions: list[FleetAction] = []
        added: list[Slot] = []
        num_staying = self._slots.num_staying()
        for role, wanted in self._wanted.items():
            if num_staying[role] > wanted:
                for slot in self._slots.staying(role)[wanted:]:
                    actions += self._services.leave(slot, "not wanted any more", now)
            added += self._slots.add_all(role, max(0, wanted - num_staying[role]), now)
        # By number: where workers share GPUs, each GPU then gets a prefill and a decode worker.
        starts = [self._services.start(slot, now) for slot in sorted(added, key=lambda slot: slot.member.ordinal)]
        return [*actions, *starts]

    def _end(self, now: float) -> list[FleetAction]:
        """Rule 4. A slot that does not serve leaves at once."""
        actions: list[FleetAction] = []
        reason, self._rollout.roll = "the fleet stops", None
        for slot in self._slots:
            slot.replaces = slot.leave_at = None
        for slot in self._slots:
            is_router = slot.member.role is ServiceRole.ROUTER and slot.state is not SlotState.DRAINING
            if is_router or slot.state in NOT_SERVING:
                actions += self._services.leave(slot, reason, now)
        if all(serving.role is not ServiceRole.ROUTER for serving in self._slots.live()):
            for slot in self._slots:
                if slot.state is SlotState.DRAINING:
                    slot.deadline = min(slot.deadline or now, now + LAST_DRAIN_S + DRAIN_GRACE_S)
                else:
                    actions += self._services.leave(slot, reason, now, LAST_DRAIN_S)
        return actions

    def _publish(self) -> list[FleetAction]:
        """Rule 2."""
        before, self._published = self._published, self._slots.publications()
        return [found for router, found in self._published.items() if before.get(router) != found]

    def _announce(self) -> list[FleetAction]:
        """The news that the supervisor waits for."""
        actions: list[FleetAction] = []
        is_starting = not self._was_ready and not self._ending
        if is_starting and all(slot.state is SlotState.SERVING for slot in self._slots if slot.replaces is None):
            self._was_ready = True
            actions.append(FleetReady())
        if self._ending and not self._slots and not self._stopped:
            self._stopped = True
            actions.append(FleetStopped())
        return actions
