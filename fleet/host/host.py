"""The process of one service, as the supervisor sees it. fleet/ray/hosts.py makes Ray actors of hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from core.config import LiveConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from core.traffic import RouterTraffic
from fleet.host.service_host import StartFault
from fleet.law.events import MachineId, Member


class HostDied(Exception):
    """The process of a host has ended, or was ended because a call into it failed. Every later call raises this too."""


class OtherVersion(HostDied):
    """The process runs a version of Tandem without this call, or with other parameters of it."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """The place of a service among the services of its machine."""

    rank: int  # among the workers of the machine; 0 for a router, which shares no cores
    num_workers: int  # wanted in the fleet


@dataclass(frozen=True, slots=True)
class Adoption:
    """The answer of a host to a new supervisor: its service, and the place where it serves."""

    member: Member
    endpoint: Endpoint
    machine: MachineId
    rank: int  # as of `LocalRank`


class Host(Protocol):
    """One process that hosts one service. Every method but `kill` raises `HostDied`."""

    async def machine(self) -> MachineId:
        """Wait for the placement."""

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint | StartFault:
        """`address` as in `Placement`."""

    async def wait(self) -> None:
        """Return when the service was stopped."""

    async def drain(self, timeout_s: float) -> None: ...

    async def set_config(self, live: LiveConfig) -> None:
        """Of a started service."""

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        """Drain the worker, and let it serve in this role. Returns the reason if it cannot, else an empty text."""

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None: ...

    async def traffic(self, start_s: float) -> RouterTraffic:
        """As `RouterControl.traffic`, of a started router."""

    def kill(self) -> None: ...
