"""A supervisor goes on with the services of an earlier one, and starts only what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from core.config import ConfigText, LiveConfig, RouterConfig, TandemConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.host import Adoption, Host
from fleet.law.events import (
    FleetAdopted,
    FleetFailed,
    FleetReady,
    MachineId,
    Member,
    PublishFleet,
    ServiceStarted,
    SlotId,
    StartFailed,
    StartService,
)
from fleet.supervisor.supervisor import Supervisor
from tests.support.waiting import until
from tests.unit.fleet.driving_fleet import D, Fleet, P, R
from tests.unit.fleet.test_supervisor import HERE, SPEC, THERE, FakeHost, Site


def adopted(
    pool: ServiceRole, number: int, start: int, role: ServiceRole | None = None
) -> tuple[MachineId, ServiceStarted]:
    member = Member(SlotId(pool, number), role or pool, start)
    started = ServiceStarted(member, f"{member.name}-{start:x}", f"host:{start}", "1.2")
    return MachineId("m-0", "m-0.local"), started


SERVICES = adopted(R, 0, 3), adopted(P, 0, 1), adopted(D, 0, 7)


def test_a_whole_fleet_is_ready_without_a_start_and_its_routers_hear_of_it() -> None:
    fleet = Fleet()
    assert sorted(fleet.names(StartService)) == ["decode-0", "prefill-0", "router-0"]

    fleet = Fleet(*SERVICES)
    assert not fleet.names(StartService)
    assert {name: fleet.state_of(name)[0] for name in fleet.members} == dict.fromkeys(fleet.members, "serving")
    assert fleet.revisions() == dict.fromkeys(fleet.members, 1)


def test_adoption_publishes_the_lists_and_says_how_many_serve() -> None:
    fleet = Fleet()
    empty = type(fleet.machine)(fleet.rules)
    actions = empty.handle(FleetAdopted(SERVICES), 5.0)
    empty.check()
    (publication,) = [action for action in actions if isinstance(action, PublishFleet)]
    assert [worker.member.name for worker in publication.workers] == ["prefill-0", "decode-0"]
    assert any(isinstance(action, FleetReady) for action in actions)
    (said,) = [action.text for action in actions if hasattr(action, "text")]
    assert said == "fleet goes on with the services of an earlier supervisor: 3 serve"


def test_what_is_missing_starts_under_a_new_number() -> None:
    fleet = Fleet(*SERVICES[:2])
    fleet.send(StartFailed(SERVICES[0][1].member, "of another life", permanent=True))  # a serving slot ignores it
    assert fleet.state_of("router-0")[0] == "serving"
    fleet = Fleet(*SERVICES[:2])
    assert fleet.members["decode-0"].start > SERVICES[0][1].member.start


def test_a_pool_that_was_scaled_keeps_its_size_and_a_switched_worker_its_role() -> None:
    fleet = Fleet(*SERVICES, adopted(D, 3, 9), adopted(D, 1, 8, role=P))
    assert fleet.machine.wanted == {P: 2, D: 2, R: 1}
    assert not fleet.names(StartService)


def test_a_start_that_cannot_succeed_does_not_end_a_fleet_that_serves() -> None:
    fleet = Fleet(*SERVICES[:2])
    fleet.placed("decode-0")
    fleet.send(StartFailed(fleet.members["decode-0"], "no such model", permanent=True))
    assert not fleet.of(FleetFailed)
    assert fleet.printed() == ["decode-0 did not start: no such model; starting it again in 1 s"]
    alone = Fleet()
    alone.placed("decode-0")
    alone.send(StartFailed(alone.members["decode-0"], "no such model", permanent=True))
    assert alone.of(FleetFailed)


class Heirs(Site):
    """A site whose supervisor finds a router on its machine and a decode worker on another one."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        text = ConfigText.of(TandemConfig(router=RouterConfig(max_queued=7)))
        self.supervisor = Supervisor(
            replace(SPEC, text=text), lambda member, spec: FakeHost(self, member, spec), HERE, self._leaving, self._find
        )
        self.found: list[FakeHost] = []

    async def _find(self) -> list[tuple[Host, Adoption]]:
        services: list[tuple[Host, Adoption]] = []
        for machine, rank, pool, start in ((HERE, 0, R, 4), (THERE, 1, D, 6)):
            member = Member(SlotId(pool, 0), pool, start)
            host = FakeHost(self, member, SPEC)
            self.found.append(host)
            endpoint = Endpoint(f"{member.name}.{start:x}", "127.0.0.1:1", pool, "1.1")
            services.append((host, Adoption(member, endpoint, machine, rank)))
        return services


@pytest_asyncio.fixture
async def heirs() -> AsyncIterator[Heirs]:
    site = Heirs()
    await site.supervisor.start()
    await site.comes_to_serve("router-0", "prefill-0", "decode-0")
    yield site
    await site.supervisor.shutdown()
    await until(lambda: not site.supervisor._hosts, "every host has ended", 5.0)
    for task in site.supervisor._tasks:
        task.cancel()
    assert site.supervisor._claim is not None
    site.supervisor._claim.close()


async def test_adopted_services_are_configured_published_watched_and_drained_like_others(heirs: Heirs) -> None:
    router, decode = heirs.found
    assert len(heirs.hosts) == 3, "one start, of the missing prefill worker"
    assert [endpoint.service_id for endpoint in await heirs.supervisor.routers()] == ["router-0.4"]
    await until(lambda: {"decode-0", "prefill-0"} <= router.roles.keys(), "the router knows the workers", 5.0)
    await until(lambda: router.live == decode.live != LiveConfig(), "both have the live options", 5.0)
    assert heirs.host("prefill-0").local_rank is not None
    assert heirs.host("prefill-0").local_rank.rank == 0, "rank 1 of its machine is taken"  # type: ignore[union-attr]
    decode.die("out of memory")
    await heirs.reports("decode-0", "died")
    await until(lambda: heirs.host("decode-0") is not decode, "it starts again", 5.0)
    await heirs.comes_to_serve("router-0", "prefill-0", "decode-0")
