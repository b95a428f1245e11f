"""The fleet of a world with faults: its FleetMachine gets the orders of the scenario, and its starts may fail.

Services start on a few machines. A machine that leaves with a time limit ends then, and what still runs there dies.
"""

from __future__ import annotations

from functools import partial
from typing import assert_never

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.fleet_control import SlotState
from core.lifecycle import ServiceRole
from fleet.law.claims import Claims
from fleet.law.events import (
    FleetEvent,
    FleetRules,
    MachineId,
    MachineLeaving,
    Member,
    NewConfig,
    ScaleTo,
    StopRoll,
    SwitchRole,
)
from fleet.law.slots import OTHER_ROLE
from simulator.search.orders import FleetFaults, Order, OrderKind
from simulator.shells.fleet_shell import FleetShell, Services, Workers
from simulator.virtual.world import SimulationError, World

NUM_MACHINES = 3
PUBLISH_S = 0.02
NOTICE_S = 0.05  # from the end of a process to this news
SHORTEST_START_S, LONGEST_START_S = 0.1, 0.6
SIZES = {ServiceRole.PREFILL: (0, 3), ServiceRole.DECODE: (1, 3), ServiceRole.ROUTER: (1, 3)}  # least, most
SCALED_ROLES = (*([ServiceRole.PREFILL, ServiceRole.DECODE] * 2), ServiceRole.ROUTER)
LEAVES_IN_S = (None, 0.5, 3.0)


class WorldFleet(FleetShell):
    def __init__(
        self, world: World, sizes: dict[ServiceRole, int], faults: FleetFaults, workers: Workers, routers: Services
    ) -> None:
        config = ClusterConfig(
            num_routers=sizes[ServiceRole.ROUTER],
            num_prefill=sizes[ServiceRole.PREFILL],
            num_decode=sizes[ServiceRole.DECODE],
            max_workers=4,
            start_timeout_s=10.0,
            restart_backoff_s=0.1,
        )
        self._rules = FleetRules(Claims(config), faults.drain_timeout_s, faults.drain_timeout_s)
        super().__init__(world, self._rules, workers, self._draw_start, routers, PUBLISH_S)
        self._faults = faults
        self._num_machines = 0
        self._machines = [self._new_machine() for _ in range(NUM_MACHINES)]
        self._machine_of: dict[Member, MachineId] = {}

    def _new_machine(self) -> MachineId:
        self._num_machines += 1
        return MachineId(f"machine-{self._num_machines}", "")

    def _draw_start(self, _: Member) -> float:
        is_first = self._world.now == 0.0
        return 0.0 if is_first else self._world.random.uniform(SHORTEST_START_S, LONGEST_START_S)

    def machine_for(self, member: Member) -> MachineId:
        machine = self._machine_of[member] = self._world.random.choice(self._machines)
        return machine

    def start_fails(self, member: Member) -> bool:
        del member
        fails = self._world.now > 0.0 and self._world.chance(self._faults.failed_start)
        self._world.counts["start fails"] += fails
        return fails

    # ---- orders

    def order(self, order: Order) -> None:
        workers = [member for member in self.ids if member.role is not ServiceRole.ROUTER]
        if order.kind is OrderKind.DIE and workers:
            self._kill(self._world.random.choice(workers), order.kind.value)
        event = self._event_of(order.kind)
        if event is None:
            return
        try:
            self.post(event)
            self._world.counts[order.kind.value] += 1
        except InvalidRequest as error:
            self._world.counts["refused order"] += 1
            self._world.note(f"{order.kind.value}: refused, {error}")

    def _event_of(self, kind: OrderKind) -> FleetEvent | None:
        """None where no service could follow the order."""
        chance = self._world.random
        match kind:
            case OrderKind.SWITCH:
                return self._switch()
            case OrderKind.SCALE:
                role = chance.choice(SCALED_ROLES)
                return ScaleTo({role: chance.randint(*SIZES[role])})
            case OrderKind.ROLL:
                return NewConfig(self._rules, restarts=True)
            case OrderKind.STOP_ROLL:
                return StopRoll()
            case OrderKind.LEAVE:
                return self._leave(chance.choice(self._machines), chance.choice(LEAVES_IN_S))
            case OrderKind.DIE:
                return None
            case _:
                assert_never(kind)

    def _switch(self) -> SwitchRole | None:
        """Of a worker that serves; the last decode worker stays one."""
        keeps = ServiceRole.DECODE if self.machine.wanted[ServiceRole.DECODE] == 1 else None
        slots = [
            slot
            for slot in self.machine.status(self._world.now).slots
            if slot.state is SlotState.SERVING and slot.role in OTHER_ROLE and slot.role is not keeps
        ]
        if not slots:
            return None
        slot = self._world.random.choice(slots)
        return SwitchRole(slot.name, OTHER_ROLE[slot.role])

    def _leave(self, machine: MachineId, in_s: float | None) -> MachineLeaving:
        self._machines[self._machines.index(machine)] = self._new_machine()
        if in_s is not None:
            self._world.after(in_s, partial(self._end_machine, machine))
        return MachineLeaving(machine, in_s)

    def _end_machine(self, machine: MachineId) -> None:
        for member in [member for member in self.ids if self._machine_of[member] == machine]:
            self._kill(member, "dies with its machine")

    def _kill(self, member: Member, what: str) -> None:
        """A process ends in any state of its service."""
        self._world.counts[what] += 1
        self._world.note(f"{member.name} {what}")
        self._services(member).end_service(self.ids[member], killed=True)
        self._world.after(NOTICE_S, partial(self.died, self.ids[member]))

    # ---- the end

    @property
    def is_at_rest(self) -> bool:
        status = self.machine.status(self._world.now)
        return not status.rolling and all(slot.state is SlotState.SERVING for slot in status.slots)

    def check_at_rest(self) -> None:
        """Raises `SimulationError` unless as many services as wanted serve, with one config, and no other one lives."""
        status = self.machine.status(self._world.now)
        serving = {role: sum(slot.role is role for slot in status.slots) for role in status.wanted}
        revisions = {slot.revision for slot in status.slots}
        if not self.is_at_rest or serving != dict(status.wanted) or revisions != {status.revision}:
            raise SimulationError(f"seed {self._world.seed}: the fleet does not come to rest: {status}")
        if len(self.ids) != len(status.slots):
            raise SimulationError(f"seed {self._world.seed}: a service outlives its slot: {self.ids}")
