"""The supervisor goes on when Ray fails a kill or a member dies early. It reports its own failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.config import ClusterConfig
from core.errors import TandemError, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from fleet.events import FleetFailed, FleetMessage, FleetReady, FleetStopped, Member, ScaleTo
from fleet.machine import FleetMachine
from fleet.service_host import Placement, StartFault
from fleet.supervisor import FleetSpec, FleetUpdate, HostDied, LocalRank, Refusal, Supervisor, SupervisorMachine

START_TIMEOUT_S = 0.05


@dataclass
class FakeHost:
    """Serves until `end` has the reason of its death."""

    member: Member
    hangs: bool  # at its start
    ray_is_away: bool
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def machine(self) -> str:
        return "here"

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint | StartFault:
        del address, local_rank
        if self.hangs:
            raise HostDied(await self.end)
        return Endpoint(f"{self.member.name}.{self.member.start}", "127.0.0.1:1", self.member.role)

    async def wait(self) -> None:
        raise HostDied(await self.end)

    async def drain(self, timeout_s: float) -> None:
        del timeout_s

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None:
        del workers, routers

    def kill(self) -> None:
        if self.ray_is_away:
            raise ConnectionError("the GCS does not answer")
        if not self.end.done():
            self.end.set_result("killed")


def no_service(placement: Placement) -> Any:
    raise AssertionError(f"nothing starts a service at {placement}")


class Fleet:
    """One router and one decode worker, of fake hosts."""

    def __init__(self) -> None:
        self.hosts: list[FakeHost] = []
        self.hang_next = self.ray_is_away = False
        self.updates: list[FleetUpdate] = []
        cluster = ClusterConfig(
            num_prefill=0, num_decode=1, start_timeout_s=START_TIMEOUT_S, restart_backoff_s=0.01, max_workers=4
        )
        spec = FleetSpec(cluster, no_service, no_service, no_service, lambda _: "127.0.0.1", 0, 5.0, 5.0)
        self.supervisor = Supervisor(spec, self.create_host, SupervisorMachine("here", ""))

    def create_host(self, member: Member) -> FakeHost:
        self.hosts.append(FakeHost(member, self.hang_next, self.ray_is_away))
        self.hang_next = False
        return self.hosts[-1]

    def hosts_of(self, role: ServiceRole) -> list[FakeHost]:
        return [host for host in self.hosts if host.member.role is role]

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not found():
                self.updates += await self.supervisor.updates()

    async def until_update(self, update: FleetUpdate) -> None:
        await self.until(lambda: update in self.updates)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.supervisor.start()
    await fleet.until_update(FleetReady())
    try:
        yield fleet
    finally:
        for task in fleet.supervisor._tasks:
            task.cancel()
        await asyncio.gather(*fleet.supervisor._tasks, return_exceptions=True)
        assert fleet.supervisor._driver is not None
        fleet.supervisor._driver.stop()
        assert fleet.supervisor._claim is not None
        fleet.supervisor._claim.close()


async def test_a_kill_that_ray_fails_is_reported_and_the_fleet_goes_on() -> None:
    """The new decode worker hangs at its start, so its start is timed out and its host killed."""
    async with serving() as fleet:
        fleet.hang_next = fleet.ray_is_away = True
        await fleet.supervisor.scale({ServiceRole.DECODE: 2})
        await fleet.until_update(FleetMessage("decode-1 could not be killed: ConnectionError: the GCS does not answer"))
        await fleet.until_update(FleetMessage("decode-1 serves"))
        assert len(fleet.hosts_of(ServiceRole.DECODE)) == 3, "the slot has started again"
        assert not isinstance(await fleet.supervisor.scale({ServiceRole.DECODE: 1}), Refusal)
        await fleet.until_update(FleetMessage("decode-1 has drained"))
        assert not [update for update in fleet.updates if isinstance(update, FleetFailed)]


async def test_a_member_that_dies_before_its_drain_begins_has_drained() -> None:
    async with serving() as fleet:
        (dying,) = fleet.hosts_of(ServiceRole.DECODE)
        dying.end.set_result("out of memory")
        await fleet.supervisor.scale({ServiceRole.DECODE: 0})  # the supervisor learns of the death first
        await fleet.until_update(FleetMessage("decode-0 has drained"))
        await fleet.supervisor.shutdown()
        await fleet.until_update(FleetStopped())
        assert not [update for update in fleet.updates if isinstance(update, FleetFailed)]


async def test_a_task_of_the_supervisor_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as fleet:

        def create_host(_: Member) -> FakeHost:
            raise RuntimeError("no such resource")

        monkeypatch.setattr(fleet.supervisor, "_create_host", create_host)
        await fleet.supervisor.scale({ServiceRole.DECODE: 2})
        await fleet.until_update(FleetFailed("the supervisor has a bug: RuntimeError('no such resource')"))


async def test_a_supervisor_that_has_failed_refuses_new_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer the sizes of before, and never start a worker again."""
    async with serving() as fleet:
        handle = FleetMachine.handle

        def fail(machine: FleetMachine, event: Any, now: float) -> Any:
            if isinstance(event, ScaleTo):
                raise KeyError("a slot")
            return handle(machine, event, now)

        monkeypatch.setattr(FleetMachine, "handle", fail)
        with pytest.raises(TandemError, match="KeyError"):
            await fleet.supervisor.scale({ServiceRole.DECODE: 2})
        await fleet.until_update(FleetFailed("the supervisor has a bug: KeyError('a slot')"))
        with pytest.raises(WorkerUnavailable):
            await fleet.supervisor.scale({ServiceRole.DECODE: 3})
