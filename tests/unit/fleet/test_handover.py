"""A supervisor that adopts services goes on with the sizes, the pins, the config and the roll of the earlier one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from core.config import LiveConfig, RouterConfig
from core.errors import InvalidRequest, WorkerUnavailable
from core.fleet_control import ConfigChange, FleetConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet import handover
from fleet.events import (
    Drained,
    FleetAdopted,
    FleetReady,
    MachineId,
    Member,
    RollLeft,
    ServiceStarted,
    SlotId,
    StartFailed,
    StartService,
    StopRoll,
)
from fleet.handover import Handover, KeptConfig, KeptRoll, take_over
from fleet.host import Adoption, Host
from fleet.machine import FleetMachine
from fleet.spec import FleetSpec
from fleet.supervisor import Supervisor
from tests.support.waiting import until
from tests.unit.fleet.driving_fleet import D, Fleet, P, R
from tests.unit.fleet.test_supervisor import HERE, SPEC, THERE, FakeHost, Site


def spec_of(drain_s: float = 30.0, max_queued: int = 100, built_text: str = "") -> FleetSpec:
    """Of a config with an option for a roll and a live one."""
    text = json.dumps({"worker": {"drain_s": drain_s}, "router": {"max_queued": max_queued}})
    built_text = built_text or text

    def reread(config: str) -> FleetSpec:
        tables = json.loads(config)
        return spec_of(tables["worker"]["drain_s"], tables["router"]["max_queued"])

    def amend(config: str, options: str) -> tuple[FleetSpec, tuple[str, ...]]:
        del config
        changed = json.loads(options)["router"]["max_queued"]
        return spec_of(drain_s, changed, built_text), (f"max_queued {changed}",)

    live = LiveConfig(router=RouterConfig(max_queued=max_queued))
    return replace(
        SPEC, drain_timeout_s=drain_s, live=live, text=text, built_text=built_text, reread=reread, amend=amend
    )


def serves(pool: ServiceRole, number: int, start: int) -> tuple[MachineId, ServiceStarted]:
    member = Member(SlotId(pool, number), pool, start)
    return MachineId("m-0", "m-0.local"), ServiceStarted(member, f"{member.name}.{start:x}", f"host:{start}")


SERVICES = serves(R, 0, 3), serves(P, 1, 4), serves(D, 0, 2)
SIZES = {P: 1, D: 1, R: 1}


# ---- the machine


def adopting(event: FleetAdopted) -> Fleet:
    """A fleet of two workers in each pool by its config, with the services and the sizes of an earlier one."""
    fleet = Fleet(num_prefill=2, num_decode=2)
    fleet.machine = FleetMachine(fleet.rules)
    fleet.members = {started.member.name: started.member for _, started in event.services}
    fleet.send(event)
    return fleet


def test_sizes_are_those_of_the_earlier_supervisor_smaller_ones_too_and_a_service_that_died_meanwhile_starts() -> None:
    fleet = adopting(FleetAdopted(SERVICES, {P: 2, D: 1, R: 1}))
    assert fleet.machine.wanted == {P: 2, D: 1, R: 1}
    assert fleet.names(StartService) == ["prefill-0"]


def roll_left(can_stop: bool = True) -> FleetAdopted:
    """prefill-1 has rolled to config 4."""
    rules = Fleet().rules
    rolled = frozenset({SERVICES[1][1].member})
    return FleetAdopted(SERVICES, SIZES, {3: rules, 4: rules}, 4, RollLeft(3, can_stop, rolled))


def test_a_roll_goes_on_with_the_services_that_have_not_rolled_while_the_fleet_is_ready() -> None:
    fleet = adopting(roll_left())
    assert fleet.printed()[1] == "fleet goes on with the roll to config 4"
    assert fleet.of(FleetReady), "every service serves"
    assert fleet.names(StartService) == ["decode-1"]
    fleet.started("decode-1")
    fleet.send(Drained(fleet.members["decode-0"]))
    fleet.started("router-1")
    fleet.send(Drained(fleet.members["router-0"]))
    assert "fleet has rolled: every service has config 4" in fleet.printed()
    assert fleet.revisions() == {"prefill-1": 4, "decode-1": 4, "router-1": 4}


def test_a_failure_of_that_roll_restores_what_the_earlier_supervisor_had_rolled() -> None:
    fleet = adopting(roll_left())
    fleet.placed("decode-1")
    fleet.send(StartFailed(fleet.members["decode-1"], "no such option", permanent=True))
    assert fleet.names(StartService) == ["prefill-0"], "prefill-1 rolls back"
    assert fleet.machine.status(fleet.now).revision == 3


def test_a_roll_that_restores_goes_on_and_cannot_be_stopped() -> None:
    fleet = adopting(roll_left(can_stop=False))
    assert not fleet.machine.can_stop_roll
    with pytest.raises(Exception, match="no roll that could be stopped"):
        fleet.send(StopRoll())


# ---- the record


def record(config: KeptConfig, roll: KeptRoll | None = None, started: FleetSpec | None = None) -> str:
    sizes = {role.value: size for role, size in SIZES.items()}
    return Handover((started or spec_of()).text, sizes, ("decode",), config, roll).as_json()


def test_a_record_can_be_read_again_and_one_of_another_version_is_none() -> None:
    kept = KeptConfig.of(4, spec_of(7.0))
    written = Handover("{}", {"decode": 2}, ("decode",), kept, KeptRoll(kept, True, ("decode-0.1",)))
    assert Handover.from_json(written.as_json()) == written
    assert [Handover.from_json(text) for text in ("", "[]", "{}", '{"config": 1}')] == [None] * 4


def test_roles_tables_options_and_fields_of_another_version_are_left_out_or_told() -> None:
    kept = KeptConfig.of(3, spec_of(7.0))
    fields = json.loads(record(kept, KeptRoll(kept, True, ("prefill-1.4",))))
    fields |= {
        "sizes": {"decode": 2, "encode": 1, "prefill": 2**63, "router": "two"},
        "pinned": ["encode", "prefill"],
        "later": [1],
    }
    fields["config"]["later"] = fields["roll"]["later"] = fields["roll"]["leaves"]["later"] = 2
    takeover = take_over(json.dumps(fields), spec_of(), SERVICES)
    assert (takeover.adopted.sizes, takeover.pinned) == ({D: 2}, (P,))
    changed = handover._changed_options('{"router": {}}', '{"router": {"max_queued": 5}, "later": {"x": 1}}')
    assert changed == '{"router": {"max_queued": 5}, "later": {"x": 1}}', "an option that one config lacks has changed"


@pytest.mark.parametrize("text", ["[]", "no json", "1", "[" * 100_000])
def test_a_config_that_is_none_makes_no_record(text: str) -> None:
    fields = json.loads(record(KeptConfig.of(3, spec_of())))
    fields["config"]["text"] = text
    assert Handover.from_json(json.dumps(fields)) is None


def test_a_roll_and_a_change_count_for_the_same_config_and_under_the_same_number() -> None:
    changed = spec_of(7.0, 5, built_text=spec_of(7.0).text)
    takeover = take_over(record(KeptConfig.of(3, changed)), spec_of(), SERVICES)
    (revision, spec), adopted = next(iter(takeover.specs.items())), takeover.adopted
    assert (revision, adopted.revision, adopted.roll, adopted.sizes) == (3, 3, None, SIZES)
    assert (spec.text, spec.built_text, spec.live) == (changed.text, changed.built_text, changed.live)
    assert adopted.rules[3].drain_timeout_s == 7.0
    assert takeover.pinned == (D,)
    (note,) = takeover.notes
    assert note.what == "keeps what `tandem config` or `tandem roll` has changed"
    assert note.reason == "config 3 differs from that of `tandem serve`"


def test_another_config_of_tandem_serve_wins_and_says_so() -> None:
    takeover = take_over(record(KeptConfig.of(3, spec_of(max_queued=5))), spec_of(9.0), SERVICES)
    assert {revision: spec.text for revision, spec in takeover.specs.items()} == {4: spec_of(9.0).text}
    assert [note.what for note in takeover.notes] == ["forgets what `tandem config` or `tandem roll` had changed"]
    unchanged = take_over(record(KeptConfig.of(1, spec_of())), spec_of(9.0), SERVICES)
    assert not unchanged.notes, "nothing is forgotten"


def test_a_roll_to_the_file_that_tandem_serve_reads_now_goes_on_and_one_to_another_begins_anew() -> None:
    roll = KeptRoll(KeptConfig.of(1, spec_of()), True, ("prefill-1.4",))
    rolling = record(KeptConfig.of(2, spec_of(7.0)), roll)
    edited = take_over(rolling, spec_of(7.0), SERVICES)
    assert edited.adopted.roll == RollLeft(1, True, frozenset({SERVICES[1][1].member}))
    assert {revision: spec.drain_timeout_s for revision, spec in edited.specs.items()} == {1: 30.0, 2: 7.0}
    other = take_over(rolling, spec_of(9.0), SERVICES)
    assert (other.adopted.revision, other.adopted.roll) == (3, RollLeft(1, True, frozenset()))
    assert {revision: spec.drain_timeout_s for revision, spec in other.specs.items()} == {1: 30.0, 3: 9.0}


def test_a_config_that_cannot_be_read_any_more_is_told_and_sizes_and_pins_stay() -> None:
    def refuse(config: str) -> FleetSpec:
        raise InvalidRequest("config", f"[worker] drain_s is not an option: {config}")

    started = replace(spec_of(), reread=refuse)  # of another version
    takeover = take_over(record(KeptConfig.of(3, spec_of(7.0))), started, SERVICES)
    assert takeover.specs == {4: started}
    assert (takeover.adopted.sizes, takeover.pinned) == (SIZES, (D,))
    assert "`tandem roll` gives every service the present one" in takeover.notes[0].reason


# ---- the supervisor


class Store:
    """As that of Ray, which may be away."""

    def __init__(self) -> None:
        self.record, self.is_away = "", False
        self.answers = asyncio.Event()  # to a read
        self.answers.set()

    async def read(self) -> str:
        await self.answers.wait()
        return self.record

    async def write(self, record: str) -> None:
        if self.is_away:
            raise WorkerUnavailable("Ray does not answer")
        self.record = record


class Generation(Site):
    """A supervisor with a store, and with the services of the generation before it."""

    def __init__(self, spec: FleetSpec, store: Store, before: Generation | None = None) -> None:
        super().__init__(spec)
        self.before, self.store = before, store
        self.supervisor = Supervisor(
            spec, lambda member, spec: FakeHost(self, member, spec), HERE, self._leaving, self._find, store
        )

    async def _find(self) -> list[tuple[Host, Adoption]]:
        if self.before is None:
            return []
        ids = {slot.name: slot.service_id for slot in (await self.before.supervisor.status()).slots}
        return [
            (FakeHost(self, member, SPEC), Adoption(member, Endpoint(ids[member.name], "h:1", member.role), THERE, 0))
            for member in self.before.supervisor._hosts
            if ids[member.name]
        ]


@contextlib.asynccontextmanager
async def living(generation: Generation) -> AsyncIterator[Supervisor]:
    """Ended like a process that is killed."""
    heir = generation.supervisor
    await heir.start()
    try:
        yield heir
    finally:
        for task in heir._tasks:
            task.cancel()
        assert heir._claim is not None
        heir._claim.close()


NAMES = "router-0", "prefill-0", "decode-0"


async def test_what_an_operator_has_set_outlives_the_supervisor() -> None:
    first = Generation(spec_of(), Store())
    async with living(first) as killed:
        await first.comes_to_serve(*NAMES)
        await killed.scale({D: 2})
        assert await killed.change_config("", '{"router": {"max_queued": 5}}') == ConfigChange(2, ("max_queued 5",))
        await first.comes_to_serve(*NAMES, "decode-1")
        await killed.scale({D: 1})
    second = Generation(spec_of(), first.store, before=first)
    async with living(second) as heir:
        await second.comes_to_serve(*NAMES)
        status = await heir.status()
        assert status.planner.pinned == (D,)
        assert status.wanted == {P: 1, D: 1, R: 1}
        assert await heir.config() == FleetConfig(2, spec_of(max_queued=5).text)
        await until(
            lambda: {host.live.router.max_queued for host in second.hosts if host.live} == {5}, "all have it", 5.0
        )


async def test_a_roll_outlives_the_supervisor() -> None:
    first = Generation(spec_of(), Store())
    async with living(first) as killed:
        await first.comes_to_serve(*NAMES)
        first.hang_next = True  # the new prefill worker does not start
        assert await killed.roll(spec_of(7.0).text) == 2
    second = Generation(spec_of(), first.store, before=first)
    async with living(second) as heir:
        async with asyncio.timeout(5.0):
            while (status := await heir.status()).rolling:
                await asyncio.sleep(0.005)
        assert {slot.revision for slot in status.slots} == {2}
        newest = [second.host(slot.name).spec.drain_timeout_s for slot in status.slots]
        assert newest == [7.0] * 3


async def test_a_record_that_could_not_be_written_is_written_when_ray_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "KEEP_INTERVAL_S", 0.01)
    site = Generation(spec_of(), Store())
    async with living(site) as alive:
        site.store.is_away = True
        await alive.scale({D: 0})
        site.store.is_away = False
        await until(lambda: '"decode": 0' in site.store.record, "the record has the size", 5.0)


async def test_a_record_without_a_service_does_not_count() -> None:
    """That of a fleet that was stopped, or of one whose services have ended."""
    store = Store()
    store.record = record(KeptConfig.of(3, spec_of(7.0)))
    site = Generation(spec_of(), store)
    async with living(site) as alive:
        await site.comes_to_serve(*NAMES)
        assert (await alive.status()).planner.pinned == ()
        assert await alive.config() == FleetConfig(1, spec_of().text)


async def test_an_order_that_comes_before_the_end_of_the_adoption_is_refused() -> None:
    """A router that was adopted already forwards it."""
    first = Generation(spec_of(), Store())
    async with living(first):
        await first.comes_to_serve(*NAMES)
    second = Generation(spec_of(), first.store, before=first)
    first.store.answers.clear()
    starting = asyncio.create_task(second.supervisor.start())
    await until(lambda: len(second.hosts) == 3, "they are found", 5.0)
    with pytest.raises(WorkerUnavailable, match="starts"):
        await second.supervisor.scale({D: 2})
    starting.cancel()
    assert second.supervisor._claim is not None
    second.supervisor._claim.close()
