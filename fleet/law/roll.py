r"""One roll: every service starts again with another revision of the config, one at a time.

    next slot --replaced by a new one--> the new one serves --> the old one drains --> gone --> next slot
              \-- no machine has room for both: the old one drains first --------/

A failure of a service with the new revision ends the roll. Another roll then restores the revision before; failures do
not end that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.fleet_control import SlotState
from core.lifecycle import ServiceRole
from fleet.law.events import Member, SlotId
from fleet.law.slots import Slot, Slots

# Routers last: a router of either revision serves with workers of both.
ORDER = (ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER)
STARTED = (SlotState.PLACING, SlotState.STARTING, SlotState.SERVING)  # a slot that waits starts with the new revision


@dataclass(slots=True)
class Roll:
    revision: int  # that every service gets
    restores: int | None  # revision to return to after a failure; None: this roll returns
    started: SlotId | None = None  # the slot of the present step
    replaced: Member | None = None  # by that slot

    def begin_step(self, started: Slot, replaced: Slot | None) -> None:
        self.started = started.member.slot
        self.replaced = None if replaced is None else replaced.member

    def step_ended(self, slots: Slots) -> bool:
        """True if the slot of the step serves, or is not wanted any more, and the service before it has left.

        A slot that had no machine before the step may have none afterwards.
        """
        if self.replaced is not None and slots.newest(self.replaced) is not None:
            return False
        slot = None if self.started is None else slots.get(self.started)
        if slot is None or slot.state in (SlotState.SERVING, SlotState.DRAINING):
            return True
        return slot.state is SlotState.PLACING and self.replaced is None

    def next_slot(self, slots: Slots) -> Slot | None:
        """The next slot to replace: first one that does not serve, since its end costs nothing."""
        others = [slot for slot in slots if slot.revision != self.revision and slot.state in STARTED]
        return min(
            others,
            key=lambda slot: (
                slot.state is SlotState.SERVING,
                ORDER.index(slot.member.role),
                slot.member.ordinal,
            ),
            default=None,
        )

    def is_failed_by(self, slot: Slot) -> bool:
        return self.restores is not None and slot.revision == self.revision
