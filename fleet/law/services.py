"""Starts, replaces and drains one service at a time, each under the rules of its revision of the config."""

from __future__ import annotations

import math

from core.fleet_control import SlotState
from fleet.law import role_switch
from fleet.law.events import DrainService, FleetAction, FleetMessage, FleetRules, KillService, Member, StartService
from fleet.law.slots import Slot, Slots

DRAIN_GRACE_S = 2.0  # after the time limit of a drain or a switch; beyond: the process is killed
PLACING_NOTICE_S = 10.0  # a service without a machine; beyond: a note says what is missing; it waits on


class Services:
    def __init__(self, rules: FleetRules) -> None:
        self.slots = Slots()
        self.rules = {1: rules}  # by revision
        self.revision = 1  # of new starts
        self.num_starts = 0

    @property
    def newest_rules(self) -> FleetRules:
        return self.rules[self.revision]

    def start(self, slot: Slot, now: float) -> StartService:
        self.num_starts += 1
        slot.member = Member(slot.member.slot, slot.member.role, self.num_starts)
        reason = self.newest_rules.claims.wait_reason(slot.member.role)
        slot.enter(SlotState.PLACING, now, now + PLACING_NOTICE_S, reason)
        slot.machine = slot.machine_ends_at = None
        slot.revision, slot.configuring = self.revision, 0
        replaced = self.slots.replaced_by(slot)
        return StartService(slot.member, slot.revision, None if replaced is None else replaced.member)

    def replace(self, slot: Slot, leave_at: float, reason: str, now: float) -> list[FleetAction]:
        """Start a replacement of a serving slot, which drains when that serves, or at `leave_at`."""
        slot.leave_at, slot.reason = leave_at, reason
        actions: list[FleetAction] = []
        replacement = self.slots.replacement_of(slot)
        if replacement is None:
            replacement = self.slots.add(slot.member.role, now)
            replacement.replaces = slot.member.slot
            actions.append(self.start(replacement, now))
        return [*actions, FleetMessage(slot.member.name, f"is replaced by {replacement.member.name}", reason)]

    def leave(self, slot: Slot, reason: str, now: float, limit_s: float = math.inf) -> list[FleetAction]:
        """Drain for at most `limit_s`, the limit of the role, and the rest of the time of its machine."""
        replacement, name = self.slots.replacement_of(slot), slot.member.name
        actions = [] if replacement is None else self.leave(replacement, reason, now)
        if slot.state is SlotState.SERVING:
            left_s = math.inf if slot.machine_ends_at is None else slot.machine_ends_at - now - DRAIN_GRACE_S
            timeout_s = max(0.0, min(limit_s, left_s, self.rules[slot.revision].drain_limit_s(slot.member.role)))
            slot.enter(SlotState.DRAINING, now, now + timeout_s + DRAIN_GRACE_S, reason)
            return [*actions, DrainService(slot.member, timeout_s), FleetMessage(name, "drains", reason, printed=False)]
        if slot.state is SlotState.SWITCHING:
            role_switch.abandon(slot, now, now + limit_s + DRAIN_GRACE_S, reason)
            return [*actions, FleetMessage(name, "drains and does not switch", reason, printed=False)]
        if slot.state in (SlotState.PLACING, SlotState.STARTING):
            actions.append(KillService(slot.member))
        self.slots.remove(slot)
        return [*actions, FleetMessage(name, f"leaves before it serves ({slot.state.value})", reason, printed=False)]
