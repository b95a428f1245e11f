"""The supervisor of the fleet as operators see and steer it, through a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from core.lifecycle import ServiceRole
from core.service import PoolSizes


class SlotState(Enum):
    WAITING = "waiting"  # pauses after a failure
    PLACING = "placing"  # waits for a machine with room
    STARTING = "starting"  # has a machine
    SERVING = "serving"
    SWITCHING = "switching"  # finishes its requests, then serves in the other role
    DRAINING = "draining"  # finishes its requests


@dataclass(frozen=True, slots=True)
class SlotStatus:
    name: str  # such as decode-1
    role: ServiceRole  # of the service that runs, or starts next, or after the switch
    state: SlotState
    in_state_s: float
    reason: str = ""  # of the state, or of leaving it; empty if the service serves and stays
    service_id: str = ""  # of a service that serves or drains
    machine: str = ""  # name of its machine, once it has one
    version: str = ""  # of the software of a service that serves or drains
    revision: int = 0  # of the config that it has, from 1; 0 = not started yet


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """The planner (fleet/planner/planner.py), and the traffic as it sees it."""

    enabled: bool = False
    pinned: tuple[ServiceRole, ...] = ()  # pools whose sizes an operator has set
    plan: str = ""  # the sizes and their reason; empty if it is off
    rate: float = 0.0  # requests/s that arrive
    num_ended: int = 0  # requests in the newest 5 minutes
    attainment: float = 0.0  # share of these within the wanted times


@dataclass(frozen=True, slots=True)
class FleetStatus:
    wanted: PoolSizes
    slots: tuple[SlotStatus, ...]  # by role and number
    revision: int = 0  # of the config of new starts
    rolling: bool = False  # services of other revisions are being replaced
    planner: PlanStatus = PlanStatus()


@dataclass(frozen=True, slots=True)
class FleetNote:
    """Something that happened to the fleet, with its reason."""

    number: int  # counts all notes of the supervisor from 1
    at_unix_s: float
    subject: str  # a slot, a machine or "fleet"
    what: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    revision: int  # of new starts
    text: str  # as JSON: one object for each table, without the token of the cluster


@dataclass(frozen=True, slots=True)
class ConfigChange:
    revision: int  # that every service gets
    changes: tuple[str, ...]  # one line for each option; empty if the config has these values already
    restarts: bool = False  # every service starts again; else it takes the changes while it serves


class FleetControl(Protocol):
    """Every method raises `WorkerUnavailable` if the supervisor is dead or silent."""

    async def scale(self, sizes: PoolSizes, auto: bool = False) -> PoolSizes:
        """Set the wanted sizes of these roles. Returns all sizes now wanted. Raises `InvalidRequest`.

        The planner then leaves these pools alone. With `auto`, it sizes all others, those too that were set before.
        """

    async def switch_role(self, slot: str, role: ServiceRole) -> PoolSizes:
        """Begin to give a worker the other role. Returns all sizes now wanted. Raises `InvalidRequest`."""

    async def status(self) -> FleetStatus: ...

    async def config(self) -> FleetConfig: ...

    async def apply(self, config: str, options: str, restart: bool, expected_revision: int = 0) -> ConfigChange:
        """Begin to give every service another config. Raises `InvalidRequest` naming what cannot change.

        `config` is a whole one as JSON, one object for each table; `options` has only the options to change. At least
        one of them is empty. Services start again, one at a time, for `restart` and for options that are not live.
        Nothing changes in a fleet with another revision than `expected_revision`; 0 = any.
        """

    async def stop_roll(self) -> ConfigChange:
        """Begin to restore the config before the present roll. Raises `InvalidRequest`."""

    async def notes(self, limit: int, after: int) -> list[FleetNote]:
        """The newest notes with a higher number than `after`, at most `limit`, oldest first."""
