"""A candidate gains a source where reading a prefix from a peer's cache, or from its own disk, ends sooner than
computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from core.block_hash import hash_on_disk, root_hash, sequence_hashes
from core.config import RouterConfig
from core.errors import QueueFull, TransferFailed, WorkerUnavailable
from core.handoff import PrefixSource
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PathState, PathStatus
from core.request import Request, SamplingParams
from core.scheduling.worker_load import RouterCalls, WorkerChanges, WorkerLoad
from core.step import SampledToken
from router.requests import events
from router.requests.machine import RouterMachine
from router.requests.open_dispatches import LATE_S
from router.routing.policy import (
    DISK_READ_S,
    MAX_TIMED,
    MESSAGE_S,
    NO_READ,
    UNKNOWN_BYTES_PER_S,
    Candidate,
    PrefixRead,
    RoutingQuestion,
    SecondsPolicy,
    WorkerView,
)
from router.routing.source_trial import SourceTrial
from router.routing.workers import hashes_of
from tests.unit.router.driving_router import NUM_BLOCKS, SERVING, agent
from tests.unit.router.test_policy import AUTO, BLOCK, IDLE, NEVER, backlog

BLOCK_BYTES = 1_000_000
READER = replace(IDLE, worker_id="P", reads_prefixes=True, block_bytes=BLOCK_BYTES, agent_name="P")
OWNER = replace(READER, worker_id="S", agent_name="S")
D = replace(IDLE, worker_id="D")
PATH = PathStatus("S", PathState.FINE, bytes_per_s=1e9)  # a block in 1 ms; to compute it takes 4


def read_by(
    reader: WorkerView, owner: WorkerView = OWNER, owned: int = 80, cached: int = 0, now: float = 0.0
) -> PrefixRead:
    """Of a prompt of 100 tokens."""
    question = RoutingQuestion(100, [(reader, cached)], [(D, 0)], True, BLOCK, now, [(owner, owned)])
    found = SecondsPolicy(NEVER).candidates(question)[0]
    assert found.read is NO_READ or found.uncached_tokens == 100 - owned
    return found.read


def test_a_prefix_is_read_where_that_is_faster_than_computing_it() -> None:
    reader = replace(READER, paths={"S": PATH})
    assert read_by(reader)[:3] == ("S", 80, pytest.approx(0.02 + MESSAGE_S))
    assert read_by(reader).gain_s == pytest.approx(0.06 - MESSAGE_S)
    assert read_by(reader, cached=40)[:3] == ("S", 40, pytest.approx(0.01 + MESSAGE_S))
    assert read_by(reader, cached=80) is NO_READ
    assert read_by(replace(reader, paths={"S": replace(PATH, bytes_per_s=2e8)})) is NO_READ  # 0.1 s for 0.08 s


def test_the_queue_and_the_read_pass_at_the_same_time() -> None:
    reader = replace(READER, paths={"S": PATH}, backlog=backlog(0.05))
    question = RoutingQuestion(100, [(reader, 0)], [(D, 0)], True, BLOCK, sources=[(OWNER, 80)])
    found = SecondsPolicy(NEVER).candidates(question)[0]
    assert found.read.seconds < found.queue_s
    assert found.first_token_s == pytest.approx(found.queue_s + found.prefill_s + MESSAGE_S)


def test_a_decode_worker_alone_reads_too() -> None:
    reader = replace(READER, worker_id="D", agent_name="D", paths={"S": PATH})
    question = RoutingQuestion(100, [], [(reader, 0)], False, BLOCK, sources=[(OWNER, 80)])
    found = SecondsPolicy(AUTO).candidates(question)[0]
    assert (found.prefill_worker, found.read.source, found.uncached_tokens) == (None, "S", 20)


def test_the_last_token_of_a_prompt_is_not_read() -> None:
    reader = replace(READER, paths={"S": PATH})
    question = RoutingQuestion(80, [(reader, 0)], [(D, 0)], True, BLOCK, sources=[(OWNER, 80)])
    found = SecondsPolicy(NEVER).candidates(question)[0]
    assert (found.read.num_tokens, found.uncached_tokens) == (76, 4)


def test_pulls_that_the_router_knows_of_come_first() -> None:
    reader = replace(READER, paths={"S": PATH}, link_until=10.03)
    assert read_by(reader, now=10.0).seconds == pytest.approx(0.05 + MESSAGE_S)
    assert read_by(reader, replace(OWNER, link_until=10.05), now=10.0).seconds == pytest.approx(0.07 + MESSAGE_S)
    assert read_by(reader, replace(OWNER, link_until=10.07), now=10.0) is NO_READ
    assert read_by(reader, now=10.03).seconds == pytest.approx(0.02 + MESSAGE_S)


def test_a_path_that_the_reader_has_not_measured_is_as_fast_as_the_way_back() -> None:
    assert read_by(READER).seconds == pytest.approx(0.002 + MESSAGE_S)
    back = replace(OWNER, paths={"P": replace(PATH, peer="P")})
    assert read_by(READER, back).seconds == pytest.approx(0.02 + MESSAGE_S)


def test_a_path_that_nobody_has_measured_is_as_fast_as_the_fastest_that_is_measured() -> None:
    router = Driven(DRAINING)
    paths = tuple(PathStatus(f"W{place}", PathState.FINE, bytes_per_s=speed) for place, speed in enumerate((1e6, 9e5)))
    router.machine.handle(events.WorkerReported("D", WorkerChanges(paths=paths)), 0.0)
    source = router.source_of(router.ask())
    assert source is not None
    seconds = MESSAGE_S + 10 * agent("S").layout.block_bytes / 1e6
    assert source.limit_s == pytest.approx(2 * seconds + LATE_S)


@pytest.mark.parametrize("state", [PathState.UNREACHABLE, PathState.REFUSED])
def test_no_prefix_is_read_without_a_path(state: PathState) -> None:
    assert read_by(replace(READER, paths={"S": replace(PATH, state=state)})) is NO_READ


def test_a_worker_that_cannot_read_or_whose_source_has_failed_computes() -> None:
    assert read_by(replace(READER, reads_prefixes=False)) is NO_READ
    assert read_by(replace(READER, avoided_sources={"S": 20.0}), now=10.0) is NO_READ
    assert read_by(replace(READER, avoided_sources={"S": 20.0}), now=20.0).source == "S"


def test_no_prefix_is_read_into_a_pool_without_room() -> None:
    """The cached part of the prompt is of the free blocks, until the prompt holds it."""
    reader = replace(READER, num_cached_blocks=10, num_free_blocks=20)
    assert read_by(reader, cached=40).num_tokens == 40
    assert read_by(replace(reader, num_free_blocks=19), cached=40) is NO_READ


def test_a_read_must_bring_the_first_token_sooner_than_a_hand_off_of_the_same_blocks() -> None:
    """The prefill worker that has the prefix is idle, and the path to it is as fast for a hand-off as for a read."""
    decode = replace(READER, worker_id="D", agent_name="D", paths={"S": PATH})

    def candidates(owner: WorkerView) -> list[Candidate]:
        question = RoutingQuestion(100, [(owner, 80)], [(decode, 0)], True, BLOCK, 10.0, [(owner, 80)])
        return SecondsPolicy(AUTO).candidates(question)

    hand_off, computed = candidates(OWNER)
    assert (hand_off.prefill_worker, hand_off.read, computed.read) == ("S", NO_READ, NO_READ)
    assert hand_off.transfer_s > 0.0, "the second token waits for the blocks"
    read = candidates(replace(OWNER, backlog=backlog(0.1), reported_at=10.0))[0]
    assert (read.prefill_worker, read.read.source) == (None, "S"), "the owner of the prefix is busy"


def test_no_prefix_is_read_from_a_pool_whose_blocks_others_wait_for() -> None:
    assert read_by(READER, replace(OWNER, num_free_blocks=20)).num_tokens == 80
    assert read_by(READER, replace(OWNER, num_free_blocks=19)) is NO_READ


# ---- the calls

LOAD = replace(SERVING, gives_prefixes=True, step_cost=IDLE.cost)
PROMPT = tuple(range(1, 42))


class Driven:
    """A router with the prefill worker P, the decode worker D and the worker S, which has a prefix."""

    def __init__(
        self, source_load: WorkerLoad = LOAD, sources: Sequence[str] = ("S",), adapter: str = "", **config: object
    ) -> None:
        options = RouterConfig(**({"local_prefill": "never", "peer_prefixes": "auto"} | config))  # type: ignore[arg-type]
        self.machine = RouterMachine(options, iter(range(1, 99)).__next__)
        self.num_requests, self.adapter = 0, adapter
        for name in ("P", "D", *sources):
            role = ServiceRole.PREFILL if name.startswith("P") else ServiceRole.DECODE
            cached = tuple(self._hashes()) if name in sources else ()
            load = source_load if name in sources else LOAD
            self.machine.handle(events.WorkerJoined(name, role, agent(name), cached, load), 0.0)

    def _hashes(self) -> list[int]:
        return list(sequence_hashes(PROMPT, agent("S").layout.block_size, root_hash("", self.adapter)))

    def ask(self, now: float = 0.0) -> list[events.RouterAction]:
        self.num_requests += 1
        sampling, name = SamplingParams(max_tokens=4), f"r{self.num_requests}"
        request = Request(name, PROMPT, len(PROMPT), sampling, adapter=self.adapter)
        return self.machine.handle(events.RequestArrived(request, now, now + 60.0), now)

    def prefilled(self, actions: list[events.RouterAction], now: float, read_tokens: int | None) -> None:
        """The prefill call of these actions returns."""
        (prefill,) = [action for action in actions if isinstance(action, events.StartPrefill)]
        result = events.PrefillResult(0, SampledToken(1), None, 0, 0.0, 0.0, read_tokens=read_tokens)
        self.machine.handle(events.PrefillReturned(prefill.dispatch_id, result), now)

    @staticmethod
    def source_of(actions: list[events.RouterAction]) -> PrefixSource | None:
        (prefill,) = [action for action in actions if isinstance(action, events.StartPrefill)]
        return prefill.prefix


DRAINING = replace(LOAD, state=WorkerState.DRAINING)


@pytest.mark.parametrize("load", [LOAD, DRAINING])
def test_the_call_names_the_source_and_the_source_is_told(load: WorkerLoad) -> None:
    router = Driven(load)
    actions = router.ask()
    (offer,) = [action for action in actions if isinstance(action, events.OfferPrefix)]
    source = router.source_of(actions)
    assert source is not None
    assert (source.agent.name, source.num_tokens, source.transfer_id) == (agent("S").name, 40, offer.transfer_id)
    assert (offer.worker_id, offer.reader.name, offer.token_ids) == ("S", agent("P").name, PROMPT[:40])
    assert source.limit_s == offer.limit_s == pytest.approx(0.05 + 2 * MESSAGE_S, rel=0.01)


def test_no_source_is_named_for_a_prompt_with_an_adapter() -> None:
    """It would give the blocks of the model alone."""
    router = Driven(adapter="sql")
    actions = router.ask()
    assert router.source_of(actions) is None
    assert not [action for action in actions if isinstance(action, events.OfferPrefix)]


@pytest.mark.parametrize("peer_prefixes", ["auto", "never"])
def test_a_decode_worker_that_reads_takes_blocks_for_the_whole_prompt(peer_prefixes: str) -> None:
    router = Driven(DRAINING, local_prefill="auto", peer_prefixes=peer_prefixes)
    router.machine.handle(events.WorkerLost("P", "x"), 0.0)
    (decode,) = [action for action in router.ask() if isinstance(action, events.StartDecode)]
    assert (decode.prefix is not None) is (peer_prefixes == "auto")
    assert router.machine.workers.chosen("D").view.num_free_blocks == NUM_BLOCKS - 11  # of 4 tokens, for 41


def test_of_equal_sources_another_is_asked_while_one_is_busy_or_has_failed() -> None:
    """A policy prices four sources for a reader; those that it avoids are not among them."""
    router = Driven(DRAINING, [f"S{number}" for number in range(8)])
    sources = [router.source_of(router.ask(now)) for now in (0.0, 0.001, 0.002, 0.003, 0.004, 0.005)]
    assert len({source.agent.name for source in sources if source is not None}) == 6


def test_a_retry_reads_nothing_from_a_worker_that_has_failed_the_request() -> None:
    router = Driven(replace(LOAD, prompt_backlog=backlog(9.0)), ["P1"])
    prompt = hashes_of(Request("r", PROMPT, len(PROMPT), SamplingParams(max_tokens=4)))
    workers = router.machine.workers
    assert any(candidate.read.source == "P1" for candidate in workers.candidates(prompt, frozenset(), 0.0))
    retries = workers.candidates(prompt, frozenset({"P1"}), 0.0)
    assert {(retry.prefill_worker, retry.read.source) for retry in retries} == {("P", None)}


@pytest.mark.parametrize("num_routers", [1, 3])
def test_reads_and_hand_offs_take_their_links_once_for_each_router(num_routers: int) -> None:
    router = Driven(DRAINING)
    calls = {f"router-{number}": RouterCalls(1, 1) for number in range(1, num_routers)}
    router.machine.handle(events.WorkerReported("D", WorkerChanges(replace(LOAD, router_calls=calls))), 0.0)
    router.ask()
    table = router.machine.workers
    hand_off_s = 11 * table.chosen("D").view.block_bytes / UNKNOWN_BYTES_PER_S
    read_s = MESSAGE_S + 10 * table.chosen("D").view.block_bytes / UNKNOWN_BYTES_PER_S
    links = [table.chosen(name).link_until / num_routers for name in ("S", "P", "D")]
    assert links == pytest.approx([read_s, read_s + hand_off_s, read_s + hand_off_s])


def test_without_reads_no_hand_off_is_timed() -> None:
    router = Driven(peer_prefixes="never")
    router.ask()
    assert all(record.link_until == 0.0 for record in router.machine.workers)


@pytest.mark.parametrize(("peer_prefixes", "reads"), [("never", False), (RouterConfig().peer_prefixes, True)])
def test_a_router_names_a_source_only_where_the_config_says_so(peer_prefixes: str, reads: bool) -> None:
    router = Driven(peer_prefixes=peer_prefixes)
    assert (router.source_of(router.ask()) is not None) is reads


def test_a_worker_of_another_kind_is_no_source() -> None:
    router = Driven(SERVING)
    assert router.source_of(router.ask()) is None


def test_the_first_read_from_a_source_is_a_trial() -> None:
    router = Driven()
    first = router.ask()
    assert router.source_of(first) is not None
    assert router.source_of(router.ask(0.1)) is None
    router.prefilled(first, 0.2, 40)
    assert all(router.source_of(router.ask(now)) is not None for now in (0.3, 0.3, 0.4))


@pytest.mark.parametrize(
    ("fails", "is_asked_again"),
    [
        (lambda name: events.PrefixRefused(name, "S", QueueFull("x")), False),
        (lambda name: events.PrefixRefused(name, "S", WorkerUnavailable("x")), False),
        (lambda name: events.PrefillReturned(name, TransferFailed("x")), False),
        (lambda name: events.PrefillReturned(name, QueueFull("x")), True),
    ],
    ids=["no offer", "it is gone", "the call fails", "the call has not begun"],
)
def test_a_source_is_not_asked_again_after_its_offer_or_a_call_with_it_has_failed(
    fails: Callable[[str], events.RouterEvent], is_asked_again: bool
) -> None:
    router = Driven()
    router.prefilled(router.ask(), 1.0, 40)
    (offer,) = [action for action in router.ask(2.0) if isinstance(action, events.OfferPrefix)]
    router.machine.handle(fails(offer.dispatch_id), 2.1)
    for name in ("P", "S"):
        router.machine.handle(events.WorkerReported(name, WorkerChanges()), 2.1)
    assert (router.source_of(router.ask(2.2)) is not None) is is_asked_again
    router.machine.check()


def test_a_source_that_fails_again_and_again_is_asked_ever_more_rarely() -> None:
    trial, now, pauses = SourceTrial(), 0.0, []
    for _ in range(8):
        trial.begin(now)
        trial.end(0, now, now + 1.0)
        trial.end(0, now, now + 2.0)  # a read that began before the failure
        pauses.append(trial.avoided_until - now - 1.0)
        now = trial.avoided_until
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600]
    trial.end(40, now, now + 1.0)
    assert trial.avoided_until == 0.0
    trial.end(0, now + 2.0, now + 3.0)
    assert trial.avoided_until == now + 13.0


@pytest.mark.parametrize(("read_tokens", "is_asked_again"), [(0, False), (None, True), (40, True)])
def test_a_source_that_brought_nothing_is_not_asked_again_for_some_time(
    read_tokens: int | None, is_asked_again: bool
) -> None:
    """A reader that began no read, for lack of room, says nothing about its source."""
    router = Driven()
    router.prefilled(router.ask(), 1.0, read_tokens)
    assert (router.source_of(router.ask(1.1)) is not None) is is_asked_again


# ---- a disk

WITH_DISK = replace(IDLE, worker_id="P", block_bytes=BLOCK_BYTES, block_size=BLOCK, disk_bytes_per_s=1e9)
PLAIN_LOAD = replace(SERVING, step_cost=IDLE.cost)
DISK_LOAD = replace(PLAIN_LOAD, num_disk_blocks=10, disk_bytes_per_s=1e9)


def read_from_disk(worker: WorkerView, on_disk: int = 80, cached: int = 0, *, is_peer_near: bool = False) -> PrefixRead:
    """Of a prompt of 100 tokens, which a peer has, too."""
    sources = [(OWNER, 80)] if is_peer_near else []
    question = RoutingQuestion(100, [(worker, cached)], [(D, 0)], True, BLOCK, 0.0, sources, {"P": on_disk})
    found = SecondsPolicy(NEVER).candidates(question)[0]
    return found.read


def test_a_disk_is_read_where_that_is_faster_than_computing() -> None:
    assert read_from_disk(WITH_DISK)[:3] == ("P", 80, pytest.approx(0.02 + DISK_READ_S))
    assert read_from_disk(WITH_DISK, cached=40)[:3] == ("P", 40, pytest.approx(0.01 + DISK_READ_S))
    assert read_from_disk(WITH_DISK, cached=80) is NO_READ
    assert read_from_disk(WITH_DISK, on_disk=100).num_tokens == 96, "the last token is computed"
    assert read_from_disk(replace(WITH_DISK, disk_bytes_per_s=2e8)) is NO_READ  # 0.1 s for 0.08 s
    assert read_from_disk(replace(WITH_DISK, num_free_blocks=19)) is NO_READ


def test_a_large_fleet_does_not_overlook_the_worker_with_the_disk() -> None:
    """Among more workers than are priced, it has slightly more prompt work than the others."""
    others = [(replace(IDLE, worker_id=f"P{number}"), 0) for number in range(3 * MAX_TIMED)]
    busier = replace(WITH_DISK, backlog=(0.0,) * 12 + (0.01,), reported_at=0.0)
    question = RoutingQuestion(100, [*others, (busier, 0)], [(D, 0)], True, BLOCK, 0.0, (), {"P": 80})
    assert SecondsPolicy(NEVER).candidates(question)[0].prefill_worker == "P"


def test_the_faster_of_disk_and_peer_is_read() -> None:
    both = replace(READER, paths={"S": PATH}, block_size=BLOCK, disk_bytes_per_s=2e9)
    assert read_from_disk(both, is_peer_near=True).source == "P"
    assert read_from_disk(replace(both, disk_bytes_per_s=5e8), is_peer_near=True).source == "S"


def test_reports_say_what_lies_on_disk_and_no_peer_is_asked_for_it() -> None:
    machine = RouterMachine(RouterConfig(local_prefill="never", peer_prefixes="auto"), iter(range(1, 99)).__next__)
    hashes = [hash_on_disk(each) for each in sequence_hashes(PROMPT, agent("D").layout.block_size)]
    for name, role, load, cached in (
        ("P0", ServiceRole.PREFILL, PLAIN_LOAD, ()),
        ("P1", ServiceRole.PREFILL, DISK_LOAD, tuple(hashes)),
        ("D", ServiceRole.DECODE, PLAIN_LOAD, ()),
    ):
        machine.handle(events.WorkerJoined(name, role, agent(name), cached, load), 0.0)

    def chosen(number: int) -> events.StartPrefill:
        request = Request(f"r{number}", PROMPT, len(PROMPT), SamplingParams(max_tokens=4))
        actions = machine.handle(events.RequestArrived(request, 0.0, 60.0), 0.0)
        assert not any(isinstance(action, events.OfferPrefix) for action in actions)
        return next(action for action in actions if isinstance(action, events.StartPrefill))

    first = chosen(1)
    assert (first.worker_id, first.prefix) == ("P1", None)
    machine.handle(events.WorkerReported("P1", WorkerChanges(blocks=((hashes, False),))), 0.0)
    assert chosen(2).worker_id == "P0", "the blocks have left the disk of the busier worker"
