"""The machines that leave the cluster, as Ray says. Ray does not push this news, so the supervisor asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from core.errors import WorkerUnavailable
from fleet.law.events import MachineId, MachineLeaving

INTERVAL_S = 1.0

# The machines that leave, with the seconds until they end; None = without a time limit.
LeavingMachines = Callable[[], Awaitable[Mapping[MachineId, float | None]]]


class MachineWatch:
    """Reports each machine that begins to leave, except that of the supervisor."""

    def __init__(self, here: MachineId, report: Callable[[MachineLeaving], None]) -> None:
        self._here, self._report = here, report
        self.leaving: Mapping[MachineId, float | None] = {}  # as last seen

    async def run(self, leaving_machines: LeavingMachines) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                found = await leaving_machines()
            except WorkerUnavailable:
                continue  # Ray is away for a moment; the fleet goes on
            new, self.leaving = found.keys() - self.leaving.keys(), found
            for machine in new:
                self.report(machine)

    def report(self, machine: MachineId) -> None:
        """Report the machine if it leaves: also for a service that Ray has placed there in the same moment."""
        if machine in self.leaving and machine != self._here:
            self._report(MachineLeaving(machine, self.leaving[machine]))
