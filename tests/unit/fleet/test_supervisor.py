"""The supervisor with hosts that start no process. It watches machines, gives services another config, goes on
when Ray fails a kill or a member dies early, and reports its own failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest
import pytest_asyncio

from core.config import ClusterConfig, ConfigText, LiveConfig, RouterConfig
from core.cost.step_cost import StepCost
from core.errors import TandemError, WorkerUnavailable
from core.fleet_control import ConfigChange
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter, Service
from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from fleet.host.host import Adoption, Host, HostDied, LocalRank
from fleet.host.service_host import Placement
from fleet.law.events import (
    FleetAction,
    FleetEvent,
    FleetFailed,
    FleetMessage,
    FleetStopped,
    MachineId,
    Member,
    ScaleTo,
)
from fleet.law.machine import FleetMachine
from fleet.planner import shell
from fleet.supervisor import leaving_machines, publishing
from fleet.supervisor.notes import FleetUpdate
from fleet.supervisor.refusal import Refusal
from fleet.supervisor.spec import FleetSpec
from fleet.supervisor.supervisor import FoundServices, Supervisor
from runtime.shared_port import PortClaim
from tests.support.waiting import until
from tests.unit.fleet.driving_fleet import D, P, R

HERE, THERE = MachineId("here", "10.0.0.1"), MachineId("there", "10.0.0.2")


class FakeHost:
    """A service that starts at once on the machine where the test wants it, and drains at once, until it dies."""

    def __init__(self, site: Site, member: Member, spec: FleetSpec) -> None:
        self._site, self.member, self.spec = site, member, spec
        self._hangs, self._ray_is_away = site.hang_next, site.hang_next
        site.hang_next = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.local_rank: LocalRank | None = None
        self.live: LiveConfig | None = None
        self.leaving_workers: set[str] = set()  # as a router knows them
        self.roles: dict[str, ServiceRole] = {}  # of workers, likewise
        site.hosts.append(self)

    async def machine(self) -> MachineId:
        return self._site.machine

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint:
        self.local_rank = local_rank
        if self._hangs:
            raise HostDied(await self._death)
        return Endpoint(f"{self.member.name}.{self.member.start:x}", address or "127.0.0.1:1", self.member.role, "1.2")

    async def wait(self) -> None:
        if reason := await self._death:
            raise HostDied(reason)

    async def drain(self, timeout_s: float) -> None:
        self._site.drained.append((self.member.name, timeout_s))
        routers = [host for host in self._site.hosts if host.member.role is R]
        self._site.told_before_drain[self.member.name] = self.member.name in routers[-1].leaving_workers
        if self._site.dies_after_drain:
            self.die("")  # `wait` returns: the service has stopped
            await asyncio.sleep(0.01)
            raise HostDied("SIGTERM")

    async def set_config(self, live: LiveConfig) -> None:
        await self._site.services_answer.wait()
        self.live = live

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        assert role is not self.member.role
        await self.drain(timeout_s)
        return self._site.switch_fault

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None:
        del routers
        await self._site.routers_answer.wait()
        self.roles = {worker.service_id.partition(".")[0]: worker.role for worker in workers}
        self.leaving_workers = {worker.service_id.partition(".")[0] for worker in workers if worker.draining}

    async def traffic(self, start_s: float) -> RouterTraffic:
        self.start_s = start_s
        assert self.member.role is R
        self._site.num_asked += 1
        arrived = 10 * self._site.num_asked
        tokens = 8000 * arrived, 8000 * arrived, 64e6 * arrived, 300 * arrived
        totals = RequestTotals(arrived, arrived, arrived, arrived, *tokens, first_token_s=0.3 * arrived)
        cost = StepCost(0.006, 0.0, 5e-8, 2e-5, 5e-10)
        workers = [WorkerTraffic("decode-0.2", D, cost, 0.05, 8192, 400_000, 0)]
        return RouterTraffic(totals, 0, 0, 1.0, tuple(workers))

    def kill(self) -> None:
        if self._ray_is_away:
            raise ConnectionError("the GCS does not answer")
        self.die("killed")

    def die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)


class Site:
    """A supervisor, and what its hosts and its machines do."""

    def __init__(self, spec: FleetSpec, find_services: FoundServices | None = None) -> None:
        self.machine = THERE
        self.hosts: list[FakeHost] = []
        self.hang_next = False  # at its start, while Ray does not answer
        self.updates: list[FleetUpdate] = []
        self.drained: list[tuple[str, float]] = []
        self.num_asked = 0  # for traffic
        self.dies_after_drain = False  # of the service, before the process can answer
        self.switch_fault = ""  # the reason why a worker cannot switch
        self.told_before_drain: dict[str, bool] = {}  # whether the newest router knew, by worker
        self.routers_answer = asyncio.Event()
        self.routers_answer.set()
        self.services_answer = asyncio.Event()  # to `set_config`
        self.services_answer.set()
        self.leaving: Mapping[MachineId, float | None] = {}
        self.supervisor = Supervisor(
            spec, lambda member, spec: FakeHost(self, member, spec), HERE, self._leaving, find_services
        )

    async def _leaving(self) -> Mapping[MachineId, float | None]:
        return self.leaving

    async def serving(self) -> list[str]:
        return [slot.name for slot in (await self.supervisor.status()).slots if slot.state.value == "serving"]

    async def comes_to_serve(self, *names: str) -> None:
        async with asyncio.timeout(5.0):
            while sorted(await self.serving()) != sorted(names):
                await asyncio.sleep(0.005)

    async def reports(self, subject: str, what: str) -> FleetMessage:
        async with asyncio.timeout(5.0):
            while True:
                for update in self.updates:
                    if isinstance(update, FleetMessage) and (update.subject, update.what) == (subject, what):
                        return update
                self.updates += await self.supervisor.updates()

    async def fails(self, reason: str) -> None:
        async with asyncio.timeout(5.0):
            while FleetFailed(reason) not in self.updates:
                self.updates += await self.supervisor.updates()

    @property
    def has_failed(self) -> bool:
        return any(isinstance(update, FleetFailed) for update in self.updates)

    def host(self, name: str) -> FakeHost:
        """The newest one of a slot."""
        return next(host for host in reversed(self.hosts) if host.member.name == name)


def build(placement: Placement) -> Service:
    raise AssertionError(f"no process starts: {placement}")


def make(text: ConfigText) -> FleetSpec:
    config = text.config
    full = ConfigText.of(config, text.flags, text.steps)
    return replace(SPEC, text=full, drain_timeout_s=config.worker.drain_timeout_s, planner=config.planner)


def options(max_queued: int) -> str:
    return json.dumps({"router": {"max_queued": max_queued}})


CLUSTER = ClusterConfig(start_timeout_s=0.5, restart_backoff_s=0.01)
SPEC = FleetSpec(CLUSTER, build, build, build, lambda _: "127.0.0.1", 0, 30.0, 10.0, make=make)


@pytest_asyncio.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(leaving_machines, "INTERVAL_S", 0.01)
    monkeypatch.setattr(shell, "INTERVAL_S", 0.01)
    async with serving(Site(SPEC)) as site:
        yield site


@contextlib.asynccontextmanager
async def serving(site: Site) -> AsyncIterator[Site]:
    await site.supervisor.start()
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    yield site
    if not site.has_failed:
        await site.supervisor.shutdown()
        await until(lambda: not site.supervisor._hosts, "every host has ended", 5.0)
    for task in site.supervisor._tasks:
        task.cancel()
    claim = site.supervisor._claim
    assert claim is not None
    claim.close()


async def test_a_fleet_that_is_stopped_before_its_start_has_stopped() -> None:
    supervisor = Site(SPEC).supervisor
    assert await supervisor.shutdown() == 0.0
    assert await supervisor.updates() == [FleetStopped()]


async def test_a_fleet_whose_port_another_fleet_has_claimed_starts_nothing() -> None:
    """A port that all routers share with SO_REUSEPORT keeps out every other fleet, also before a router serves."""
    with contextlib.closing(PortClaim("127.0.0.1", 0)) as claim:
        site = Site(replace(SPEC, router_port=claim.port))
        await site.supervisor.start()
        assert await site.supervisor.updates() == [
            FleetFailed(f"cannot listen on {claim.address} (Address already in use); choose another port with --port")
        ]
        await site.supervisor.shutdown()
        assert await site.supervisor.updates() == [FleetStopped()]
    assert not site.hosts


async def test_a_fleet_waits_for_the_port_of_routers_that_it_could_not_adopt() -> None:
    """`ray.kill` does not wait for the end of their processes."""
    claim = PortClaim("127.0.0.1", 0)

    async def find_services() -> tuple[list[tuple[Host, Adoption]], str]:
        asyncio.get_running_loop().call_later(0.3, claim.close)
        return [], "router-0 has another config"

    async with serving(Site(replace(SPEC, router_port=claim.port), find_services)) as site:
        note = await site.reports("fleet", "ends services of an earlier supervisor")
        assert note.reason == "router-0 has another config"


async def test_the_services_of_a_leaving_machine_move_and_those_of_the_supervisor_stay(site: Site) -> None:
    site.machine = MachineId("elsewhere", "10.0.0.3")
    site.leaving = {THERE: 100.0, HERE: 100.0}
    await site.comes_to_serve("router-1", "prefill-1", "decode-1")
    await until(lambda: len(site.drained) == 3, "the old ones have drained", 5.0)
    assert sorted(site.drained) == [("decode-0", 30.0), ("prefill-0", 30.0), ("router-0", 10.0)]
    notes = [(note.number, note.subject, note.what, note.reason) for note in await site.supervisor.notes(1000, 0)]
    assert [number for number, *_ in notes] == list(range(1, len(notes) + 1))
    assert any(note[1:] == ("decode-0", "is replaced by decode-1", "10.0.0.2 leaves") for note in notes)


async def test_a_service_placed_on_a_machine_that_leaves_already_starts_again(site: Site) -> None:
    site.machine = MachineId("doomed", "10.0.0.9")
    site.leaving = {site.machine: 100.0}
    await until(lambda: site.supervisor._machine_watch.leaving == site.leaving, "the supervisor has seen it", 5.0)
    await site.supervisor.scale({D: 2})
    await until(lambda: len([h for h in site.hosts if h.member.name == "decode-1"]) > 1, "it starts again", 5.0)
    site.machine = THERE
    await site.comes_to_serve("router-0", "prefill-0", "decode-0", "decode-1")


async def test_a_worker_drains_when_the_routers_know(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_TIMEOUT_S", 60.0)
    site.routers_answer.clear()
    await site.supervisor.scale({D: 0})
    await asyncio.sleep(0.05)
    assert not site.drained
    site.routers_answer.set()
    await site.reports("decode-0", "has drained")
    assert site.told_before_drain == {"decode-0": True}


async def test_a_router_that_does_not_answer_holds_no_drain_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_TIMEOUT_S", 0.02)
    site.routers_answer.clear()
    await site.supervisor.scale({D: 0})
    await site.reports("decode-0", "has drained")
    assert site.told_before_drain == {"decode-0": False}
    site.routers_answer.set()


async def test_a_worker_switches_its_role_in_its_process_when_the_routers_know(site: Site) -> None:
    num_hosts = len(site.hosts)
    wanted = await site.supervisor.switch_role("decode-0", P)
    assert wanted == {P: 2, D: 0, R: 1}
    assert (await site.supervisor.status()).planner.pinned == (P, D)
    await site.reports("decode-0", "serves as prefill worker")
    assert site.told_before_drain == {"decode-0": True}
    assert len(site.hosts) == num_hosts
    router = site.host("router-0")
    await until(lambda: router.roles["decode-0"] is P, "the router knows the role", 5.0)
    assert not router.leaving_workers
    site.host("decode-0").die("out of memory")
    await site.reports("decode-0", "died")
    await until(lambda: len(site.hosts) == num_hosts + 1, "it starts again", 5.0)
    assert site.host("decode-0").member.role is P


async def test_a_worker_that_cannot_switch_starts_again_in_the_other_role(site: Site) -> None:
    site.switch_fault = "still has work"
    await site.supervisor.switch_role("prefill-0", D)
    assert (await site.reports("prefill-0", "did not switch")).reason.startswith("still has work; starting it again")
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    assert [host.member.role for host in site.hosts if host.member.name == "prefill-0"] == [P, D]
    assert await site.supervisor.switch_role("decode-7", P) == Refusal(
        "slot", "'decode-7' is no slot of this fleet; `tandem status` lists them"
    )


async def test_a_worker_that_is_unwanted_in_the_turn_of_its_start_starts_no_process(site: Site) -> None:
    await site.supervisor.scale({D: 2})
    await site.supervisor.scale({D: 1})
    await asyncio.sleep(0.05)
    assert not [host for host in site.hosts if host.member.name == "decode-1"]
    assert sorted(await site.serving()) == ["decode-0", "prefill-0", "router-0"]


async def test_a_roll_gives_each_service_its_config_and_the_rank_of_the_one_that_it_replaces(site: Site) -> None:
    ranks = {name: site.host(f"{name}-0").local_rank for name in ("prefill", "decode")}
    assert await site.supervisor.apply("", "", restart=True) == ConfigChange(2, (), True)
    await site.comes_to_serve("router-1", "prefill-1", "decode-1")
    assert {name: site.host(f"{name}-1").local_rank for name in ranks} == ranks
    await site.reports("fleet", "has rolled: every service has config 2")
    assert await site.supervisor.stop_roll() == Refusal("roll", "no roll that could be stopped")


async def test_a_change_reaches_services_and_later_starts_while_no_service_starts_again(site: Site) -> None:
    site.services_answer.clear()
    change = await site.supervisor.apply("", options(7), restart=False)
    assert change == ConfigChange(2, ("[router] max_queued 1024 -> 7",))
    (told,) = [note for note in await site.supervisor.notes(100, 0) if note.what == "takes config 2"]
    assert told.reason == "[router] max_queued", "events need no token, and a value may be a secret"
    assert {slot.revision for slot in (await site.supervisor.status()).slots} == {1}, "as long as none has answered"
    site.services_answer.set()
    async with asyncio.timeout(5.0):
        while {slot.revision for slot in (await site.supervisor.status()).slots} != {2}:
            await asyncio.sleep(0.005)
    assert {host.live.router.max_queued for host in site.hosts if host.live is not None} == {7}
    found = await site.supervisor.config()
    assert (found.revision, json.loads(found.text)["router"]["max_queued"]) == (2, 7)
    site.host("decode-0").die("out of memory")
    await until(lambda: len(site.hosts) == 4, "it starts again", 5.0)
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    assert site.host("decode-0").live == LiveConfig(router=RouterConfig(max_queued=7))
    assert await site.supervisor.apply("", options(7), restart=False) == ConfigChange(2, ())


async def test_a_change_that_is_based_on_another_config_than_the_present_one_is_refused(site: Site) -> None:
    """A prints config 1, B changes an option, and A would set it back."""
    first = await site.supervisor.apply("", options(7), restart=False, expected_revision=1)
    assert isinstance(first, ConfigChange)
    assert first.revision == 2
    assert await site.supervisor.apply("{}", "", restart=False, expected_revision=1) == Refusal(
        "expected_revision", "is 1, but the fleet has config 2; `tandem config` prints it"
    )
    assert json.loads((await site.supervisor.config()).text)["router"]["max_queued"] == 7


async def test_of_two_changes_at_the_same_time_one_is_refused(site: Site) -> None:
    """The second one has read the config without the first."""
    answers = await asyncio.gather(*(site.supervisor.apply("", options(7), restart=False) for _ in range(2)))
    assert ConfigChange(2, ("[router] max_queued 1024 -> 7",)) in answers
    assert Refusal("config", "another config came meanwhile; try again") in answers


async def test_a_kill_that_ray_fails_is_reported_and_the_fleet_goes_on(site: Site) -> None:
    """The new decode worker hangs at its start, so its start is timed out and its host killed."""
    site.hang_next = True
    await site.supervisor.scale({D: 2})
    message = await site.reports("decode-1", "could not be killed")
    assert message.reason == "ConnectionError: the GCS does not answer"
    await site.comes_to_serve("router-0", "prefill-0", "decode-0", "decode-1")
    assert not isinstance(await site.supervisor.scale({D: 1}), Refusal)
    await site.reports("decode-1", "has drained")
    assert not site.has_failed


async def test_a_member_that_dies_before_its_drain_begins_has_drained(site: Site) -> None:
    site.host("decode-0").die("out of memory")
    await site.supervisor.scale({D: 0})  # the supervisor learns of the death first
    await site.reports("decode-0", "has drained")
    assert not site.has_failed


async def test_a_process_that_ends_between_the_stop_of_its_service_and_its_answer_has_drained(site: Site) -> None:
    site.dies_after_drain = True
    await site.supervisor.scale({D: 0})
    await site.reports("decode-0", "has drained")
    site.dies_after_drain = False


async def test_a_task_of_the_supervisor_that_fails_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_host(*_: object) -> FakeHost:
        raise RuntimeError("no such resource")

    monkeypatch.setattr(site.supervisor, "_create_host", create_host)
    await site.supervisor.scale({D: 2})
    await site.fails("the supervisor has a bug: RuntimeError('no such resource')")


async def test_a_supervisor_that_has_failed_refuses_new_sizes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer the sizes of before, and never start a worker again."""
    handle = FleetMachine.handle

    def fail(machine: FleetMachine, event: FleetEvent, now: float) -> list[FleetAction]:
        if isinstance(event, ScaleTo):
            raise KeyError("a slot")
        return handle(machine, event, now)

    monkeypatch.setattr(FleetMachine, "handle", fail)
    with pytest.raises(TandemError, match="KeyError"):
        await site.supervisor.scale({D: 2})
    await site.fails("the supervisor has a bug: KeyError('a slot')")
    with pytest.raises(WorkerUnavailable):
        await site.supervisor.scale({D: 3})


async def test_the_planner_sizes_the_pools_that_no_operator_has_set(site: Site) -> None:
    off = Refusal("auto", "the planner is off; `tandem apply planner.enabled=true` starts it")
    assert await site.supervisor.scale({}, auto=True) == off
    bounds = {"enabled": True, "max_prefill": 2, "max_decode": 2}
    assert not isinstance(await site.supervisor.apply("", json.dumps({"planner": bounds}), restart=False), Refusal)
    assert await site.supervisor.scale({D: 1}) == {P: 1, D: 1, R: 1}
    await site.comes_to_serve("router-0", "prefill-0", "prefill-1", "decode-0")
    status = (await site.supervisor.status()).planner
    assert status.pinned == (D,)
    assert status.num_ended > 0  # of all seconds; the rate is of the newest one, which may have had no report yet
    await site.supervisor.scale({}, auto=True)
    await site.comes_to_serve("router-0", "prefill-0", "prefill-1", "decode-0", "decode-1")
    notes = [note for note in await site.supervisor.notes(100, 0) if note.subject == "planner"]
    assert "requests/s of 8000 + 300 tokens" in notes[0].reason
    await site.supervisor.apply("", json.dumps({"planner": {"enabled": False}}), restart=False)
    assert await site.supervisor.scale({}, auto=True) == off
