"""The slots of a fleet: its numbered places, each with the newest start of its service."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from core.fleet_control import SlotState, SlotStatus
from core.lifecycle import ServiceRole
from fleet.law.events import MachineId, Member, PublishFleet, ServiceStarted, Serving, SlotId

ROLES = tuple(ServiceRole)
OTHER_ROLE = {ServiceRole.PREFILL: ServiceRole.DECODE, ServiceRole.DECODE: ServiceRole.PREFILL}
# The slots that a shrinking pool keeps, first to last.
KEPT_FIRST = (SlotState.SERVING, SlotState.SWITCHING, SlotState.STARTING, SlotState.PLACING, SlotState.WAITING)
LIVE = (SlotState.SERVING, SlotState.SWITCHING, SlotState.DRAINING)
PLACED = (SlotState.STARTING, *LIVE)
BACKOFF_MAX_S = 30.0
STABLE_S = 60.0  # after this long in service, the failures of a slot count from zero again


@dataclass(slots=True)
class Slot:
    member: Member  # the newest start
    state: SlotState
    since: float
    deadline: (
        float | None
    )  # WAITING: starts then; PLACING: says so then; STARTING: fails then; SWITCHING, DRAINING: killed then
    reason: str = ""  # of the state, or of leaving it
    failures: int = 0  # since the slot was last stable
    service_id: str = ""
    address: str = ""
    machine: MachineId | None = None
    version: str = ""
    replaces: SlotId | None = None  # the slot drains when this one serves; until then this one is not counted
    leave_at: float | None = None  # a serving slot drains then, also if its replacement does not serve
    machine_ends_at: float | None = None
    leave_order: int | None = None  # while its pool shrinks: it leaves before those with a higher number, and without
    revision: int = 0  # of the config of the newest start, or of a later change that the service has taken
    configuring: int = 0  # revision on its way to the service since its start
    changed: list[Slot] = field(default_factory=list, repr=False, compare=False)  # gets this slot at each new state

    def enter(self, state: SlotState, now: float, deadline: float | None, reason: str = "") -> None:
        self.state, self.since, self.deadline, self.reason = state, now, deadline, reason
        self.leave_at = None
        self.changed.append(self)

    def serve(self, started: ServiceStarted, now: float) -> None:
        self.enter(SlotState.SERVING, now, None)
        self.service_id, self.address, self.version = started.service_id, started.address, started.version

    def fail(self, backoff_s: float, reason: str, now: float) -> float:
        """Wait for another start. Returns the pause until then, which doubles with each failure of an unstable slot."""
        if self.state is SlotState.SERVING and now - self.since >= STABLE_S:
            self.failures = 0
        pause_s = float(min(BACKOFF_MAX_S, backoff_s * 2 ** min(self.failures, 16)))
        self.failures += 1
        self.service_id = self.address = self.version = ""
        self.machine = self.machine_ends_at = None
        self.enter(SlotState.WAITING, now, now + pause_s, reason)
        return pause_s

    @property
    def due_at(self) -> float:
        """When `deadline` or `leave_at` comes; inf = never."""
        first = math.inf if self.deadline is None else self.deadline
        return first if self.leave_at is None else min(first, self.leave_at)

    @property
    def served_role(self) -> ServiceRole:
        """Of the live service. `member` already has the role after a switch."""
        return OTHER_ROLE[self.member.role] if self.state is SlotState.SWITCHING else self.member.role

    @property
    def serving(self) -> Serving:
        """The live service, as the routers learn of it."""
        is_leaving = self.state is not SlotState.SERVING
        return Serving(self.member, self.served_role, self.service_id, self.address, is_leaving)

    def check(self) -> None:
        name, state = self.member.name, self.state
        assert state is not SlotState.SERVING or self.deadline is None, f"{name} serves until a deadline"
        assert state in (SlotState.SERVING, SlotState.PLACING) or self.deadline is not None, f"{name} has no deadline"
        assert (state in LIVE) == bool(self.service_id and self.address), f"{name}: wrong name or address"
        assert state is SlotState.SERVING or self.leave_at is None, f"{name} does not serve and will leave"
        assert (state in PLACED) == (self.machine is not None), f"{name}: wrong machine"


_start_of = attrgetter("member.start")  # of a Serving


def _kept_first(slot: Slot) -> tuple[int, bool, float, int]:
    named = -math.inf if slot.leave_order is None else -slot.leave_order
    return KEPT_FIRST.index(slot.state), slot.leave_at is not None, named, slot.member.start


class Slots:
    """The slots by their names."""

    def __init__(self) -> None:
        self._slots: dict[SlotId, Slot] = {}
        self._changed: list[Slot] = []  # not in `_live` yet as they are
        self._live: list[Serving] = []  # by their start
        self._listed: dict[SlotId, Serving] = {}  # in `_live`

    def __iter__(self) -> Iterator[Slot]:
        """A copy, so that slots may be added and removed meanwhile."""
        return iter(list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, role: ServiceRole, now: float) -> Slot:
        """A slot with the lowest free number, due to start now."""
        return self.add_all(role, 1, now)[0]

    def add_all(self, role: ServiceRole, count: int, now: float) -> list[Slot]:
        """So many slots, each as `add` makes it."""
        if not count:
            return []
        taken = {slot_id.number for slot_id in self._slots if slot_id.pool is role}
        free = (number for number in range(len(taken) + count) if number not in taken)
        return [self.restore(Member(SlotId(role, number), role, 0), now) for number in islice(free, count)]

    def restore(self, member: Member, now: float) -> Slot:
        """A slot for this member, due to start now."""
        slot = self._slots[member.slot] = Slot(member, SlotState.WAITING, now, now, changed=self._changed)
        return slot

    def remove(self, slot: Slot) -> None:
        del self._slots[slot.member.slot]
        self._changed.append(slot)

    def get(self, slot_id: SlotId) -> Slot | None:
        return self._slots.get(slot_id)

    def newest(self, member: Member) -> Slot | None:
        """The slot of a member, unless the slot has started again since."""
        slot = self._slots.get(member.slot)
        return slot if slot is not None and slot.member == member else None

    def next_due(self) -> float:
        """When the next slot is due; inf = never."""
        slots = self._slots.values()
        deadlines = [slot.deadline for slot in slots if slot.deadline is not None]
        leaves = [slot.leave_at for slot in slots if slot.leave_at is not None]
        return min(min(deadlines, default=math.inf), min(leaves, default=math.inf))

    def due(self, now: float) -> list[Slot]:
        """The slots whose deadline, or time to leave, has come."""
        return [slot for slot in self._slots.values() if slot.due_at <= now] if self.next_due() <= now else []

    def num_staying(self) -> dict[ServiceRole, int]:
        """The lengths of `staying`."""
        draining = SlotState.DRAINING
        roles = [s.member.role for s in self._slots.values() if s.state is not draining and s.replaces is None]
        return {role: roles.count(role) for role in ROLES}

    def staying(self, role: ServiceRole) -> list[Slot]:
        """Slots of a role that do not drain, those to keep first; the oldest first among equals. A slot and its
        replacement are one."""
        slots = [s for s in self if s.member.role is role and s.state is not SlotState.DRAINING and not s.replaces]
        return sorted(slots, key=_kept_first)

    def lacking(self, revision: int) -> list[Slot]:
        """The serving slots that neither have this revision of the config, nor will have it soon."""
        serving = SlotState.SERVING
        return [
            slot
            for slot in self._slots.values()
            if slot.revision != revision and slot.state is serving and slot.configuring != revision
        ]

    def replaced_by(self, slot: Slot) -> Slot | None:
        """The serving slot that this one replaces."""
        return self._slots[slot.replaces] if slot.replaces is not None else None

    def replacement_of(self, slot: Slot) -> Slot | None:
        slots = [other for other in self._slots.values() if other.replaces is not None]
        return next((other for other in slots if other.replaces == slot.member.slot), None)

    def live(self) -> list[Serving]:
        """The serving and the draining members, by their start. Do not change the list."""
        for slot in self._changed:
            slot_id = slot.member.slot
            listed = self._listed.pop(slot_id, None)
            if listed is not None:
                del self._live[bisect_left(self._live, listed.member.start, key=_start_of)]
            if slot.state in LIVE and self._slots.get(slot_id) is slot:
                self._listed[slot_id] = slot.serving
                insort(self._live, self._listed[slot_id], key=_start_of)
        self._changed.clear()
        return self._live

    def publications(self) -> dict[Member, PublishFleet]:
        """The lists that every live router must have."""
        live, router = self.live(), ServiceRole.ROUTER
        routers = tuple([serving for serving in live if serving.member.role is router])
        workers = tuple([serving for serving in live if serving.member.role is not router])
        return {router.member: PublishFleet(router.member, workers, routers) for router in routers}

    def status(self, now: float) -> tuple[SlotStatus, ...]:
        """By role and number."""
        slots = sorted(self, key=lambda s: (ROLES.index(s.member.slot.pool), s.member.ordinal))
        return tuple(
            SlotStatus(
                slot.member.name,
                slot.member.role,
                slot.state,
                now - slot.since,
                slot.reason,
                slot.service_id,
                "" if slot.machine is None else str(slot.machine),
                slot.version,
                slot.revision,
            )
            for slot in slots
        )

    def check(self) -> None:
        for slot_id, slot in self._slots.items():
            assert slot_id == slot.member.slot, f"{slot.member.name} is in slot {slot_id}"
            slot.check()
            replaced = self.replaced_by(slot)
            assert replaced is None or replaced.state is SlotState.SERVING, f"{slot.member.name} replaces no service"
            assert replaced is None or slot.state not in LIVE, f"{slot.member.name} serves beside what it replaces"
            assert slot.leave_at is None or self.replacement_of(slot), f"{slot.member.name} is not replaced"
        live = sorted((slot.serving for slot in self._slots.values() if slot.state in LIVE), key=_start_of)
        assert self.live() == live, "the list of live services is old"
        replaced_ids = [slot.replaces for slot in self if slot.replaces]
        assert len(set(replaced_ids)) == len(replaced_ids), "a slot has two replacements"
        starts = [slot.member.start for slot in self if slot.member.start]
        assert len(set(starts)) == len(starts), "two members share a start"
