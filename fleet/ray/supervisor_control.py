"""The supervisor, as routers and `tandem serve` reach it: calls of its actor with a time limit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest, WorkerUnavailable
from core.fleet_control import ConfigChange, FleetConfig, FleetNote, FleetStatus
from core.lifecycle import ServiceRole
from core.service import PoolSizes
from fleet.host.host import HostDied, OtherVersion
from fleet.ray.calls import await_actor, begin_call
from fleet.supervisor.refusal import Refusal

CALL_TIMEOUT_S = 5.0  # a call of a router to the supervisor; beyond: UNAVAILABLE
APPLY_TIMEOUT_S = 30.0  # the supervisor reads the config, and imports the code for it


@dataclass(slots=True)
class SupervisorControl:
    """A `core.fleet_control.FleetControl`, once bound to the handle of the supervisor actor.

    Looking up the actor by name would block the loop, which carries every stream.
    """

    supervisor: Any  # another one after an adoption

    async def scale(self, sizes: PoolSizes, auto: bool = False) -> PoolSizes:
        wanted: PoolSizes = await self._ask("scale", sizes, auto)
        return wanted

    async def switch_role(self, slot: str, role: ServiceRole) -> PoolSizes:
        wanted: PoolSizes = await self._ask("switch_role", slot, role)
        return wanted

    async def status(self) -> FleetStatus:
        status: FleetStatus = await self._ask("status")
        return status

    async def config(self) -> FleetConfig:
        config: FleetConfig = await self._ask("config")
        return config

    async def apply(self, config: str, options: str, restart: bool, expected_revision: int = 0) -> ConfigChange:
        orders = (config, options, restart, expected_revision)
        change: ConfigChange = await self._ask("apply", *orders, limit_s=APPLY_TIMEOUT_S)
        return change

    async def stop_roll(self) -> ConfigChange:
        change: ConfigChange = await self._ask("stop_roll")
        return change

    async def notes(self, limit: int, after: int) -> list[FleetNote]:
        notes: list[FleetNote] = await self._ask("notes", limit, after)
        return notes

    async def _ask(self, method: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Raises `InvalidRequest` for a `Refusal`."""
        import ray

        limit_s = limit_s or CALL_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                answer = await await_actor(begin_call(self.supervisor, method, *arguments))
        except OtherVersion as error:
            raise WorkerUnavailable(f"the fleet's supervisor: {error}; start `tandem serve` again") from error
        except ray.exceptions.RaySystemError as error:
            raise WorkerUnavailable(f"the fleet's supervisor: {str(error).strip().splitlines()[-1]}") from error
        except HostDied as error:
            raise WorkerUnavailable("the fleet's supervisor is gone; start `tandem serve` again") from error
        except TimeoutError as error:
            raise WorkerUnavailable(f"the fleet's supervisor does not answer within {limit_s:g} s") from error
        if isinstance(answer, Refusal):
            raise InvalidRequest(answer.field, answer.message)
        return answer
