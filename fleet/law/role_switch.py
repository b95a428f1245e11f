r"""A role switch: a worker drains and then serves in the other role, in its process (docs/adr/0053).

    SERVING --SwitchRole--> SWITCHING --RoleSwitched--> SERVING          in the other role
                              |    \-- SwitchFailed, ServiceDied, too slow --> WAITING, then a start in the other role
                              \-- shutdown, not wanted any more, its machine leaves --> DRAINING --> gone

The wanted sizes change when a switch begins, and the slot counts for the pool that it joins. So no other service starts
or stops.
"""

from __future__ import annotations

from dataclasses import replace

from core.errors import InvalidRequest
from core.fleet_control import SlotState
from core.lifecycle import ServiceRole
from fleet.law.events import FleetRules, SwitchRole
from fleet.law.slots import OTHER_ROLE, Slot, Slots


def find_slot(event: SwitchRole, slots: Slots, rules: FleetRules) -> Slot:
    """The slot that can switch now. Raises `InvalidRequest` with what prevents it."""
    slot = next((slot for slot in slots if slot.member.name == event.slot), None)
    if slot is None:
        raise InvalidRequest("slot", f"{event.slot!r} is no slot of this fleet; `tandem status` lists them")
    role = slot.member.role
    if role not in OTHER_ROLE:
        raise InvalidRequest("role", f"{event.slot} is a {role.value} and stays one")
    if event.role is not OTHER_ROLE[role]:
        raise InvalidRequest("role", f"{event.slot} is a {role.value} worker already")
    if rules.role_option:
        raise InvalidRequest("role", f"cannot change with {rules.role_option}: start a worker of that role instead")
    if slot.state is not SlotState.SERVING:
        raise InvalidRequest("slot", f"{event.slot} does not serve, it is {slot.state.value}")
    if slot.leave_at is not None:
        raise InvalidRequest("slot", f"{event.slot} is being replaced: {slot.reason}")
    return slot


def begin(slot: Slot, role: ServiceRole, now: float, deadline: float) -> None:
    slot.member = replace(slot.member, role=role)
    slot.enter(SlotState.SWITCHING, now, deadline, f"becomes a {role.value} worker")


def abandon(slot: Slot, now: float, deadline: float, reason: str) -> None:
    """The service drains already, and leaves in its role."""
    assert slot.deadline is not None, "check() says so"
    slot.member, deadline = replace(slot.member, role=slot.served_role), min(slot.deadline, deadline)
    slot.enter(SlotState.DRAINING, now, deadline, reason)
