"""The supervisor with hosts that start no process: it watches machines, and rolls with the config that it has read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest
import pytest_asyncio

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter, Service
from fleet import supervisor
from fleet.events import MachineId, Member
from fleet.host import HostDied, LocalRank
from fleet.service_host import Placement
from fleet.spec import FleetSpec
from fleet.supervisor import Refusal, Supervisor
from tests.support.waiting import until

HERE, THERE = MachineId("here", "10.0.0.1"), MachineId("there", "10.0.0.2")


class FakeHost:
    """A service that starts at once on the machine where the test wants it, and drains at once."""

    def __init__(self, site: Site, member: Member, spec: FleetSpec) -> None:
        self._site, self.member, self.spec = site, member, spec
        self._ended = asyncio.Event()
        self.local_rank: LocalRank | None = None
        site.hosts.append(self)

    async def machine(self) -> MachineId:
        return self._site.machine

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint:
        self.local_rank = local_rank
        return Endpoint(f"{self.member.name}.{self.member.start:x}", address or "127.0.0.1:1", self.member.role, "1.2")

    async def wait(self) -> None:
        await self._ended.wait()
        raise HostDied("ended")

    async def drain(self, timeout_s: float) -> None:
        self._site.drained.append((self.member.name, timeout_s))

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None: ...

    def kill(self) -> None:
        self._ended.set()


class Site:
    """A supervisor, and what its hosts and its machines do."""

    def __init__(self, spec: FleetSpec) -> None:
        self.machine = THERE
        self.hosts: list[FakeHost] = []
        self.drained: list[tuple[str, float]] = []
        self.leaving: Mapping[MachineId, float | None] = {}
        self.supervisor = Supervisor(spec, lambda member, spec: FakeHost(self, member, spec), HERE, self._leaving)

    async def _leaving(self) -> Mapping[MachineId, float | None]:
        return self.leaving

    async def serving(self) -> list[str]:
        return [slot.name for slot in (await self.supervisor.status()).slots if slot.state.value == "serving"]

    async def comes_to_serve(self, *names: str) -> None:
        async with asyncio.timeout(5.0):
            while sorted(await self.serving()) != sorted(names):
                await asyncio.sleep(0.005)

    def host(self, name: str) -> FakeHost:
        """The newest one of a slot."""
        return next(host for host in reversed(self.hosts) if host.member.name == name)


def build(placement: Placement) -> Service:
    raise AssertionError(f"no process starts: {placement}")


def router_host(machine: str) -> str:
    del machine
    return "127.0.0.1"


def reread(config: str) -> FleetSpec:
    return replace(SPEC, drain_timeout_s=float(config))


SPEC = FleetSpec(ClusterConfig(), build, build, build, router_host, 0, 30.0, 10.0, reread=reread)


@pytest_asyncio.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(supervisor, "MACHINES_INTERVAL_S", 0.01)
    site = Site(SPEC)
    await site.supervisor.start()
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    yield site
    await site.supervisor.shutdown()
    await until(lambda: not site.supervisor._hosts, "every host has ended", 5.0)
    for task in site.supervisor._tasks:
        task.cancel()
    claim = site.supervisor._claim
    assert claim is not None
    claim.close()


async def test_the_services_of_a_leaving_machine_move_and_those_of_the_supervisor_stay(site: Site) -> None:
    site.machine = MachineId("elsewhere", "10.0.0.3")
    site.leaving = {THERE: 100.0, HERE: 100.0}
    await site.comes_to_serve("router-1", "prefill-1", "decode-1")
    assert sorted(site.drained) == [("decode-0", 30.0), ("prefill-0", 30.0), ("router-0", 10.0)]
    notes = [(note.number, note.subject, note.what, note.reason) for note in await site.supervisor.notes(1000, 0)]
    assert [number for number, *_ in notes] == list(range(1, len(notes) + 1))
    assert any(note[1:] == ("decode-0", "is replaced by decode-1", "10.0.0.2 leaves") for note in notes)


async def test_a_service_placed_on_a_machine_that_leaves_already_starts_again(site: Site) -> None:
    site.machine = MachineId("doomed", "10.0.0.9")
    site.leaving = {site.machine: 100.0}
    await until(lambda: site.supervisor._leaving == site.leaving, "the supervisor has seen it", 5.0)
    await site.supervisor.scale({ServiceRole.DECODE: 2})
    await until(lambda: len([h for h in site.hosts if h.member.name == "decode-1"]) > 1, "it starts again", 5.0)
    site.machine = THERE
    await site.comes_to_serve("router-0", "prefill-0", "decode-0", "decode-1")


async def test_a_roll_gives_each_service_the_new_config_and_the_rank_of_the_one_it_replaces(site: Site) -> None:
    ranks = {name: site.host(f"{name}-0").local_rank for name in ("prefill", "decode")}
    assert await site.supervisor.roll("7.5") == 2
    await site.comes_to_serve("router-1", "prefill-1", "decode-1")
    assert {host.spec.drain_timeout_s for host in site.hosts[3:]} == {7.5}
    assert {name: site.host(f"{name}-1").local_rank for name in ranks} == ranks
    assert not (await site.supervisor.status()).rolling
    assert await site.supervisor.roll("") == 3
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    assert site.host("decode-0").spec.drain_timeout_s == 7.5, "without a new config, the present one stays"


async def test_a_roll_that_cannot_begin_is_refused_as_a_value(site: Site) -> None:
    assert await site.supervisor.stop_roll() == Refusal("roll", "no roll that could be stopped")
