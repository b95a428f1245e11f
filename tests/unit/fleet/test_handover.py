"""A supervisor goes on with the services, sizes and config of an earlier one, and starts only what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from core.config import ConfigText, LiveConfig, RouterConfig, TandemConfig, WorkerConfig
from core.errors import WorkerUnavailable
from core.fleet_control import ConfigChange, FleetConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.host import Adoption, Host
from fleet.law.events import FleetAdopted, MachineId, Member, RollLeft, ServiceStarted, SlotId
from fleet.supervisor import handover
from fleet.supervisor.handover import Handover, KeptRoll, take_over
from fleet.supervisor.spec import FleetSpec
from fleet.supervisor.supervisor import Supervisor
from tests.support.waiting import until
from tests.unit.fleet.driving_fleet import D, P, R, transcripts
from tests.unit.fleet.test_supervisor import HERE, SPEC, THERE, FakeHost, Site, make, options


def spec_of(drain_s: float = 30.0, max_queued: int = 100) -> FleetSpec:
    """Of a config with two options."""
    worker, router = WorkerConfig(drain_timeout_s=drain_s), RouterConfig(max_queued=max_queued)
    return make(ConfigText.of(TandemConfig(worker=worker, router=router)))


def serves(pool: ServiceRole, number: int, start: int) -> tuple[MachineId, ServiceStarted]:
    member = Member(SlotId(pool, number), pool, start)
    return MachineId("m-0", "m-0.local"), ServiceStarted(member, f"{member.name}.{start:x}", f"host:{start}")


SERVICES = serves(R, 0, 3), serves(P, 1, 4), serves(D, 0, 2)
SIZES = {P: 1, D: 1, R: 1}


# ---- the machine

test_adoption = transcripts(
    """
a whole fleet is ready without a start and its routers learn of it
  config prefill=2 decode=2
  adopt decode-0 router-0 prefill-1 prefill=1 decode=1 routers=1 -> router-0: decode-0 prefill-1
                 -> say fleet goes on with the services of an earlier supervisor: 3 serve; ready
  state decode-0 -> serving
  configs        -> has 1; router-0 1; prefill-1 1; decode-0 1
  time 0

what is missing starts under a new number and a start that cannot succeed does not end the fleet
  adopt router-0 prefill-1 -> router-0: prefill-1
                 -> say fleet goes on with the services of an earlier supervisor: 2 serve; start decode-0
  # A serving slot ignores it.
  fails router-0 of another life
  state router-0 -> serving
  placed decode-0
  fails decode-0 no such model -> say decode-0 did not start: no such model, starting it again in 1 s

a pool that was scaled keeps its size and a switched worker its role
  adopt decode-0 router-0 prefill-1 decode-3 decode-1:prefill -> router-0: decode-0 prefill-1 decode-3 decode-1:prefill
        -> say fleet goes on with the services of an earlier supervisor: 5 serve; ready
  sizes -> 2 prefill 2 decode 1 routers

a roll goes on with the services that have not rolled while the fleet is ready
  adopt decode-0 router-0 prefill-1 config=4 rolls_from=3 rolled=prefill-1 -> router-0: decode-0 prefill-1
                   -> say fleet goes on with the services of an earlier supervisor: 3 serve
                   -> say fleet goes on with the roll to config 4; start decode-1 config 4 for decode-0
                   -> say decode-0 is replaced by decode-1: roll to config 4; ready
  configs          -> rolls to 4; router-0 3; prefill-1 4; decode-0 3; decode-1 4

a roll that restores goes on and cannot be stopped
  adopt decode-0 router-0 prefill-1 config=4 rolls_from=3 rolled=prefill-1 can_stop=0 -> router-0: decode-0 prefill-1
            -> say fleet goes on with the services of an earlier supervisor: 3 serve
            -> say fleet goes on with the roll to config 4; start decode-1 config 4 for decode-0
            -> say decode-0 is replaced by decode-1: roll to config 4; ready
  stop_roll -> refused InvalidRequest: roll: no roll that could be stopped
"""
)


# ---- the record


def record(kept: dict[int, FleetSpec], roll: KeptRoll | None = None) -> str:
    """The newest of `kept` is that of new starts."""
    texts = {revision: spec.text.as_json() for revision, spec in kept.items()}
    sizes = {role.value: size for role, size in SIZES.items()}
    return Handover(spec_of().text.as_json(), sizes, ("decode",), max(kept), texts, roll).as_json()


def test_a_record_can_be_read_again_and_one_without_sizes_is_none() -> None:
    written = Handover("{}", {"decode": 2}, ("decode",), 4, {4: "{}"}, KeptRoll(4, True, ("decode-0.1",)))
    assert Handover.from_json(written.as_json()) == written
    assert [Handover.from_json(text) for text in ("", "[]", "{}", '{"texts": 1}')] == [None] * 4
    without = take_over("[]", spec_of(), SERVICES)
    assert (without.adopted, without.specs, without.pinned) == (FleetAdopted(SERVICES), {1: spec_of()}, ())
    assert [note.what for note in without.notes] == ["has no record of its earlier supervisor"]


def test_roles_and_fields_of_another_version_are_left_out() -> None:
    fields = json.loads(record({3: spec_of(7.0)}, KeptRoll(3, True, ("prefill-1.4",))))
    fields |= {
        "sizes": {"decode": 2, "encode": 1, "prefill": 2**63, "router": "two"},
        "pinned": ["encode", "prefill"],
        "later": [1],
    }
    fields["roll"]["later"] = 2
    takeover = take_over(json.dumps(fields), spec_of(), SERVICES)
    assert (takeover.adopted.sizes, takeover.pinned) == ({D: 2}, (P,))
    assert [note.what for note in takeover.notes] == ["keeps what `tandem apply` has changed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"config": {"revision": 3, "built_text": "{}", "text": "{}"}, "roll": None, "started_text": "{}"},
        {"started": "{}", "texts": {"0": "{}"}, "revision": 0, "roll": None},
        {"started": "{}", "texts": {"3": "{}"}, "revision": 4, "roll": None},
        {"started": "{}", "texts": {str(2**32): "{}"}, "revision": 2**32, "roll": None},
        {"started": "{}", "texts": {"3": "{}"}, "revision": 3, "roll": {"leaves": 2, "can_stop": 1, "rolled": []}},
    ],
)
def test_of_a_record_with_configs_of_another_version_the_sizes_and_pins_stay(fields: dict[str, object]) -> None:
    text = json.dumps({"sizes": {"decode": 2}, "pinned": ["decode"]} | fields)
    takeover = take_over(text, spec_of(), SERVICES)
    assert (takeover.adopted.sizes, takeover.pinned, takeover.specs) == ({D: 2}, (D,), {1: spec_of()})
    (note,) = takeover.notes
    assert note.what == "cannot keep the config of its earlier supervisor"
    assert "another version of Tandem" in note.reason


@pytest.mark.parametrize("text", ["[]", "no json", "1", "[" * 100_000, '{"tables": {"worker": {"drain_s": 7}}}'])
def test_a_config_that_cannot_be_read_any_more_is_told_and_sizes_and_pins_stay(text: str) -> None:
    fields = json.loads(record({3: spec_of(7.0)}))
    fields["texts"]["3"] = text
    takeover = take_over(json.dumps(fields), spec_of(), SERVICES)
    assert takeover.specs == {4: spec_of()}
    assert (takeover.adopted.sizes, takeover.pinned) == (SIZES, (D,))
    assert "`tandem apply --restart` gives every service the present one" in takeover.notes[0].reason


def test_a_change_counts_for_the_same_config_and_under_the_same_number() -> None:
    low = {"scheduler": {"max_running": 2}}
    changed = spec_of(7.0, 5).after("", json.dumps(low), restart=False).spec
    takeover = take_over(record({3: changed}), spec_of(), SERVICES)
    assert takeover.specs == {3: changed}
    assert takeover.specs[3].text.steps["max_running"] == 0, "the engines stay built for the steps of their start"
    adopted = takeover.adopted
    assert (adopted.revision, adopted.roll, adopted.sizes) == (3, None, SIZES)
    assert adopted.rules[3].drain_timeout_s == 7.0
    assert takeover.pinned == (D,)
    (note,) = takeover.notes
    assert note.what == "keeps what `tandem apply` has changed"
    assert note.reason == "config 3 differs from that of `tandem serve`"


def test_a_kept_config_has_the_flags_of_the_present_tandem_serve() -> None:
    flags = {"router": {"max_queued": 100}}
    started = replace(spec_of(), text=replace(spec_of().text, flags=flags))
    takeover = take_over(record({3: spec_of(7.0)}), started, SERVICES)
    assert (takeover.specs[3].text.flags, takeover.specs[3].drain_timeout_s) == (flags, 7.0)


def test_another_config_of_tandem_serve_wins_and_says_so() -> None:
    takeover = take_over(record({3: spec_of(max_queued=5)}), spec_of(9.0), SERVICES)
    assert takeover.specs == {4: spec_of(9.0)}
    assert [note.what for note in takeover.notes] == ["forgets what `tandem apply` had changed"]
    unchanged = take_over(record({1: spec_of()}), spec_of(9.0), SERVICES)
    assert not unchanged.notes, "nothing is forgotten"


def test_an_option_that_a_record_lacks_has_its_default() -> None:
    fields = json.loads(record({3: spec_of(7.0)}))
    started = json.loads(fields["started"])
    del started["tables"]["planner"]
    takeover = take_over(json.dumps(fields | {"started": json.dumps(started)}), spec_of(), SERVICES)
    assert takeover.specs == {3: spec_of(7.0)}, "of an earlier version, with the same config"


def test_a_roll_to_the_file_that_tandem_serve_reads_now_goes_on_and_one_to_another_begins_anew() -> None:
    rolling = record({1: spec_of(), 2: spec_of(7.0)}, KeptRoll(1, True, ("prefill-1.4",)))
    edited = take_over(rolling, spec_of(7.0), SERVICES)
    assert edited.adopted.roll == RollLeft(1, True, frozenset({SERVICES[1][1].member}))
    assert {revision: spec.drain_timeout_s for revision, spec in edited.specs.items()} == {1: 30.0, 2: 7.0}
    other = take_over(rolling, spec_of(9.0), SERVICES)
    assert (other.adopted.revision, other.adopted.roll) == (3, RollLeft(1, True, frozenset()))
    assert {revision: spec.drain_timeout_s for revision, spec in other.specs.items()} == {1: 30.0, 3: 9.0}


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

    async def _find(self) -> tuple[list[tuple[Host, Adoption]], str]:
        if self.before is None:
            return [], ""
        ids = {slot.name: slot.service_id for slot in (await self.before.supervisor.status()).slots}
        found: list[tuple[Host, Adoption]] = [
            (FakeHost(self, member, SPEC), Adoption(member, Endpoint(ids[member.name], "h:1", member.role), THERE, 0))
            for member in self.before.supervisor._hosts
            if ids[member.name]
        ]
        return found, ""


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


async def test_adopted_services_are_configured_published_watched_and_drained_like_others() -> None:
    first = Generation(SPEC, Store())
    async with living(first):
        await first.comes_to_serve(*NAMES)
        first.hang_next = True
        first.host("prefill-0").die("out of memory")
        await until(lambda: not first.hang_next, "it starts again, and hangs", 5.0)
    second = Generation(spec_of(max_queued=7), first.store, before=first)
    async with living(second) as heir:
        await second.comes_to_serve(*NAMES)
        router, decode, prefill = (second.host(name) for name in ("router-0", "decode-0", "prefill-0"))
        assert second.hosts[2:] == [prefill], "one start, of the missing prefill worker"
        assert [endpoint.service_id for endpoint in await heir.routers()] == [f"router-0.{router.member.start:x}"]
        await until(lambda: {"decode-0", "prefill-0"} <= router.roles.keys(), "the router knows the workers", 5.0)
        await until(lambda: router.live == decode.live != LiveConfig(), "both have the live options", 5.0)
        assert prefill.local_rank is not None
        assert prefill.local_rank.rank == 1, "rank 0 of its machine is taken"
        decode.die("out of memory")
        await second.reports("decode-0", "died")
        await until(lambda: second.host("decode-0") is not decode, "it starts again", 5.0)
        await second.comes_to_serve(*NAMES)
        await heir.shutdown()
        await until(lambda: not heir._hosts, "every host has ended", 5.0)


async def test_what_an_operator_has_set_outlives_the_supervisor() -> None:
    first = Generation(spec_of(), Store())
    async with living(first) as killed:
        await first.comes_to_serve(*NAMES)
        await killed.scale({D: 2})
        assert await killed.apply("", options(5), restart=False) == ConfigChange(2, ("[router] max_queued 100 -> 5",))
        await first.comes_to_serve(*NAMES, "decode-1")
        await killed.scale({D: 1})
    second = Generation(spec_of(), first.store, before=first)
    async with living(second) as heir:
        await second.comes_to_serve(*NAMES)
        status = await heir.status()
        assert status.planner.pinned == (D,)
        assert status.wanted == {P: 1, D: 1, R: 1}
        assert await heir.config() == FleetConfig(2, json.dumps(spec_of(max_queued=5).text.tables))
        await until(lambda: {host.live.router.max_queued for host in second.hosts if host.live} == {5}, "all", 5.0)


async def test_a_roll_outlives_the_supervisor() -> None:
    first = Generation(spec_of(), Store())
    async with living(first) as killed:
        await first.comes_to_serve(*NAMES)
        first.hang_next = True  # the new prefill worker does not start
        config = json.dumps(spec_of(7.0).text.tables)
        changed = ("[worker] drain_timeout_s 30.0 -> 7.0",)
        assert await killed.apply(config, "", restart=True) == ConfigChange(2, changed, True)
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
    store.record = record({3: spec_of(7.0)})
    site = Generation(spec_of(), store)
    async with living(site) as alive:
        await site.comes_to_serve(*NAMES)
        assert (await alive.status()).planner.pinned == ()
        assert await alive.config() == FleetConfig(1, json.dumps(spec_of().text.tables))


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
