"""How services get another config: live options at once (rule 9), all others by a roll (rule 8)."""

from __future__ import annotations

from core.errors import InvalidRequest
from core.fleet_control import SlotState
from fleet.law.events import ConfigureService, FleetAction, FleetMessage, KillService, NewConfig
from fleet.law.roll import Roll
from fleet.law.services import Services
from fleet.law.slots import Slot

ROLL_PLACE_S = 10.0  # without a machine for the new service so long, the old one drains first


class Rollout:
    def __init__(self, services: Services) -> None:
        self._services, self._slots = services, services.slots
        self.roll: Roll | None = None

    @property
    def can_stop(self) -> bool:
        return self.roll is not None and self.roll.restores is not None

    def take(self, event: NewConfig) -> list[FleetAction]:
        """Raises `InvalidRequest` during a roll."""
        if self.roll is not None:
            raise InvalidRequest("config", "the fleet rolls already; try again afterwards")
        services = self._services
        old, services.revision = services.revision, max(services.rules) + 1
        services.rules = {old: services.rules[old], services.revision: event.rules} | {
            slot.revision: services.rules[slot.revision] for slot in self._slots if slot.revision
        }
        if event.restarts:
            self.roll = Roll(services.revision, restores=old)
        what = f"{'rolls to' if event.restarts else 'takes'} config {services.revision}"
        return [FleetMessage("fleet", what, event.changes)]

    def configure(self) -> list[FleetAction]:
        """Without a roll, every serving slot gets the newest revision."""
        lacking = [] if self.roll is not None else self._slots.lacking(self._services.revision)
        for slot in lacking:
            slot.configuring = self._services.revision
        return [ConfigureService(slot.member, self._services.revision) for slot in lacking]

    def stop(self, now: float) -> list[FleetAction]:
        """The order of an operator. Raises `InvalidRequest` without a roll that could be stopped."""
        if not self.can_stop:
            raise InvalidRequest("roll", "no roll that could be stopped")
        return self.restore("an operator has stopped the roll", now)

    def restore(self, reason: str, now: float, failed: Slot | None = None) -> list[FleetAction]:
        """Roll back. Services that only the roll replaces are not replaced any more."""
        assert self.roll is not None, "there is no roll"
        assert self.roll.restores is not None, "a roll that restores has no way back"
        actions: list[FleetAction] = []
        for slot in self._slots:
            replaced = self._slots.replaced_by(slot)
            if replaced is not None and replaced.machine_ends_at is None:
                replaced.leave_at, replaced.reason = None, ""
                if slot is not failed:
                    actions += self._services.leave(slot, reason, now)
        revision = self._services.revision = self.roll.restores
        self.roll = Roll(revision, restores=None)
        return [*actions, FleetMessage("fleet", f"restores config {revision}", reason)]

    def advance(self, now: float) -> list[FleetAction]:
        roll = self.roll
        if roll is None or not roll.step_ended(self._slots):
            return []
        if any(slot.state is SlotState.SWITCHING for slot in self._slots):
            return []
        slot = roll.next_slot(self._slots)
        if slot is None:
            self.roll = None
            return [FleetMessage("fleet", f"has rolled: every service has config {self._services.revision}")]
        if slot.state is not SlotState.SERVING:
            killed = KillService(slot.member)
            started = self._services.start(slot, now)
            roll.begin_step(slot, None)
            return [killed, started]
        leave_at = slot.leave_at if slot.machine_ends_at is not None else now + ROLL_PLACE_S
        assert leave_at is not None, "a slot on a machine that leaves has a time to leave"
        actions = self._services.replace(slot, leave_at, f"roll to config {roll.revision}", now)
        replacement = self._slots.replacement_of(slot)
        assert replacement is not None, "it has just begun to start"
        roll.begin_step(replacement, slot)
        return actions
