"""A candidate gains a source where reading a prefix from a peer's cache, or from its own disk, ends sooner than
computing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import hash_on_disk, sequence_hashes
from core.handoff import Location
from core.lifecycle import ServiceRole
from core.paths import PathState, PathStatus
from core.scheduling.worker_load import WorkerChanges
from router.requests import events
from router.requests.open_dispatches import LATE_S
from router.routing import policy
from router.routing.path_speeds import PathSpeeds
from router.routing.policy import SecondsPolicy
from router.routing.question import (
    MESSAGE_S,
    NO_READ,
    UNKNOWN_BYTES_PER_S,
    Candidate,
    Option,
    PrefixRead,
    RoutingQuestion,
    WorkerView,
)
from router.routing.source_trial import SourceTrial
from tests.unit.router.driving_router import LAYOUT, SERVING, DrivenRouter, agent, transcripts
from tests.unit.router.test_policy import AUTO, BLOCK, IDLE, NEVER, backlog

BLOCK_BYTES = 1_000_000
READER = replace(IDLE, worker_id="P", reads_prefixes=True, block_bytes=BLOCK_BYTES, agent_name="P")
OWNER = replace(READER, worker_id="S", agent_name="S")
D = replace(IDLE, worker_id="D")
WITH_DISK = replace(IDLE, worker_id="P", block_bytes=BLOCK_BYTES, block_size=BLOCK, disk_bytes_per_s=1e9)
PATH = PathStatus("S", PathState.FINE, bytes_per_s=1e9)  # a block in 1 ms; to compute it takes 4


def best(
    reader: WorkerView, cached: int = 0, *sources: Option, on_disk: int = 0, num_tokens: int = 100, now: float = 0.0
) -> Candidate:
    disk = {"P": on_disk}
    question = RoutingQuestion(num_tokens, [(reader, cached)], [(D, 0)], True, BLOCK, now, sources, disk)
    return SecondsPolicy(NEVER).candidates(question)[0]


def read_by(reader: WorkerView, owner: WorkerView = OWNER, cached: int = 0, now: float = 0.0) -> PrefixRead:
    found = best(reader, cached, (owner, 80), now=now)
    assert found.read is NO_READ or found.uncached_tokens == 20
    return found.read


def over(**path: Any) -> WorkerView:
    return replace(READER, paths={"S": replace(PATH, **path)})


def test_a_prefix_is_read_where_that_is_faster_than_computing_it() -> None:
    assert read_by(over())[:3] == ("S", 80, pytest.approx(0.02 + MESSAGE_S))
    assert read_by(over()).gain_s == pytest.approx(0.06 - MESSAGE_S)
    assert read_by(over(), cached=40)[:3] == ("S", 40, pytest.approx(0.01 + MESSAGE_S))
    assert read_by(over(latency_s=0.01)).seconds == pytest.approx(0.03 + MESSAGE_S)
    assert read_by(over(), cached=80) is NO_READ
    assert read_by(over(bytes_per_s=0.02e9 / (0.0785 - MESSAGE_S))) is NO_READ, "it saves 1.5 ms of 100"
    assert read_by(over(bytes_per_s=2e8)) is NO_READ, "0.1 s for 0.08 s"


def test_the_queue_and_the_read_pass_at_the_same_time() -> None:
    found = best(replace(over(), backlog=backlog(0.05)), 0, (OWNER, 80))
    assert found.read.seconds < found.queue_s
    assert found.first_token_s == pytest.approx(found.queue_s + found.prefill_s + MESSAGE_S)


@pytest.mark.parametrize(("num_tokens", "num_read"), [(80, 76), (81, 80)])
def test_the_last_token_of_a_prompt_is_not_read(num_tokens: int, num_read: int) -> None:
    for reader in (over(), WITH_DISK):
        found = best(reader, 0, (OWNER, 84), on_disk=84, num_tokens=num_tokens)
        assert (found.read.num_tokens, found.uncached_tokens) == (num_read, num_tokens - num_read)


def test_pulls_that_the_router_knows_of_come_first() -> None:
    reader = replace(over(), link_until=10.03)
    assert read_by(reader, now=10.0).seconds == pytest.approx(0.05 + MESSAGE_S)
    assert read_by(reader, replace(OWNER, link_until=10.05), now=10.0).seconds == pytest.approx(0.07 + MESSAGE_S)
    assert read_by(reader, replace(OWNER, link_until=10.07), now=10.0) is NO_READ
    assert read_by(reader, now=10.03).seconds == pytest.approx(0.02 + MESSAGE_S)


def test_a_path_that_the_reader_has_not_measured_is_as_fast_as_the_way_back() -> None:
    assert read_by(READER).seconds == pytest.approx(0.002 + MESSAGE_S)
    back = replace(OWNER, paths={"P": replace(PATH, peer="P")})
    assert read_by(READER, back).seconds == pytest.approx(0.02 + MESSAGE_S)


FAST, SLOW, MIDDLE = 7e9, 1.25e8, 1e9  # bytes/s: within machine A, and of the links of machines B and C

MEASURED = {"A-A": FAST, "A-B": SLOW, "A-C": MIDDLE}


@pytest.mark.parametrize(
    ("measured", "pair", "expected"),
    [
        ({}, "A-B", UNKNOWN_BYTES_PER_S),
        (MEASURED, "A-A", FAST),
        (MEASURED, "A-B", SLOW),
        (MEASURED, "B-A", SLOW),
        (MEASURED, "B-C", SLOW),  # no path is faster than the slower link
        (MEASURED, "B-X", SLOW),
        (MEASURED, "X-Y", MIDDLE),
        (MEASURED, "B-B", FAST),
        ({"A-B": SLOW, "C-X": MIDDLE}, "A-A", MIDDLE),
        ({"A-A": FAST}, "A-B", FAST),
    ],
)
def test_a_path_that_nobody_has_measured_is_as_fast_as_those_most_like_it(
    measured: dict[str, float], pair: str, expected: float
) -> None:
    workers = []
    for key, speed in measured.items():
        reader, owner = (replace(READER, agent_name=f"{key} {end}", machine=key[end]) for end in (0, 2))
        path = PathStatus(owner.agent_name, PathState.FINE, bytes_per_s=speed)
        paths, slower = {path.peer: path, "gone": replace(PATH, peer="gone")}, replace(path, bytes_per_s=speed / 2)
        workers += [replace(reader, paths=paths), owner, replace(reader, agent_name=key, paths={path.peer: slower})]
    reader, owner = replace(READER, machine=pair[0]), replace(OWNER, machine=pair[2])
    assert PathSpeeds(lambda: workers).estimate(reader, owner) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from((0.0, SLOW, FAST))), max_size=30))
def test_what_is_learned_of_changed_paths_is_what_a_look_at_all_paths_finds(
    changes: list[tuple[int, int, float]],
) -> None:
    workers = [replace(READER, agent_name=f"{n}", machine="AABC"[n], paths={}) for n in range(4)]
    learned = PathSpeeds(lambda: workers)
    for place, (reader, owner, speed) in enumerate(changes):
        paths = dict(workers[reader].paths)
        if speed:
            paths[f"{owner}"] = PathStatus(f"{owner}", PathState.FINE, bytes_per_s=speed)
        else:
            paths.pop(f"{owner}", None)
        workers[reader] = replace(workers[reader], paths=paths)
        learned.note_paths(f"{reader}", [f"{owner}", "gone"])
        if place % 3:  # else later changes come to it
            found, expected = (
                [speeds.estimate(one, other) for one in workers for other in workers]
                for speeds in (learned, PathSpeeds(lambda: workers))
            )
            assert found == expected


def test_what_workers_report_of_their_paths_counts_until_they_report_less_or_leave() -> None:
    router = with_sources("S")
    table = router.machine.workers
    p, d, s = (table.chosen(name) for name in ("P", "D", "S"))
    for speed in (2e6, 1e6):
        path = PathStatus(p.agent.name, PathState.FINE, bytes_per_s=speed)
        router.post(events.WorkerReported("D", WorkerChanges(paths=(path,))))
        assert table.path_speeds.estimate(p.view, s.view) == speed
    router.arrives("r", prompt=41)
    (offer,) = router.of(events.OfferPrefix)
    assert offer.limit_s == pytest.approx(2 * (MESSAGE_S + 10 * LAYOUT.block_bytes / 1e6) + LATE_S)
    router.post(events.WorkerReported("D", WorkerChanges(removed_paths=(p.agent.name,))))
    assert table.path_speeds.estimate(p.view, s.view) == UNKNOWN_BYTES_PER_S
    router.post(events.WorkerReported("D", WorkerChanges(paths=(path,))))
    assert table.path_speeds.estimate(d.view, s.view) == 1e6
    table.leave("P", router.now)
    assert table.path_speeds.estimate(d.view, s.view) == UNKNOWN_BYTES_PER_S
    p.agent = replace(p.agent, location=Location("A"))
    table.join(p, ())
    assert table.path_speeds.estimate(d.view, p.view) == 1e6
    assert p.view.machine == "A"


@pytest.mark.parametrize(
    ("reader", "owner", "cached", "num_read"),
    [
        ({"paths": {"S": replace(PATH, state=PathState.UNREACHABLE)}}, {}, 0, 0),
        ({"paths": {"S": replace(PATH, state=PathState.REFUSED)}}, {}, 0, 0),
        ({"reads_prefixes": False}, {}, 0, 0),
        ({"avoided_sources": {"S": 10.1}}, {}, 0, 0),
        ({"avoided_sources": {"S": 10.0}}, {}, 0, 80),
        ({"num_cached_blocks": 10, "num_free_blocks": 20}, {}, 40, 40),  # the cached part is of the free blocks
        ({"num_cached_blocks": 10, "num_free_blocks": 19}, {}, 40, 0),
        ({}, {"num_free_blocks": 20}, 0, 80),  # others wait for the blocks of its pool
        ({}, {"num_free_blocks": 19}, 0, 0),
    ],
)
def test_a_prefix_is_read_over_a_path_where_both_pools_have_room(
    reader: dict[str, object], owner: dict[str, object], cached: int, num_read: int
) -> None:
    found = read_by(replace(READER, **reader), replace(OWNER, **owner), cached=cached, now=10.0)  # type: ignore[arg-type]
    assert found.num_tokens == num_read


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


# ---- the calls

# S has cached a prefix of 40 tokens. It drains, so it takes no call. Routers name sources by default.
WORKERS = """
  enter P token_s=0.001 gives_prefixes=1
  enter D token_s=0.001 gives_prefixes=1 -> peers D owner P; peers P reader D
"""
SOURCE = f"""{WORKERS}
  enter S token_s=0.001 gives_prefixes=1 cached=40 state=draining -> peers S owner P; peers P reader S
"""
FIRST_READ = f"""{SOURCE}
  arrives a prompt=41 -> decode a#1 D from P/2; prefill a#1 P for D/2 reads 40 tokens of S/1
                      -> offer a#1 S to P/1 1..40 within 0.054 s
"""
SECOND_READ = f"""{FIRST_READ}
  prefilled a#1 7 read_tokens=40 -> deliver a 0: 7
  time 1
  arrives b prompt=41 -> decode b#1 D from P/4; prefill b#1 P for D/4 reads 40 tokens of S/3
                      -> offer b#1 S to P/3 1..40 within 0.054 s
"""

test_a_worker_that_is_no_source = transcripts(
    """
a worker of another kind
  enter S token_s=0.001 cached=40 state=draining -> peers S owner P; peers P reader S
  arrives a prompt=41 -> decode a#1 D from P/1; prefill a#1 P for D/1

a worker that has blocks of an adapter, because an offer names none
  enter S token_s=0.001 gives_prefixes=1 cached=40 adapter=sql state=draining -> peers S owner P; peers P reader S
  arrives a prompt=41 adapter=sql -> decode a#1 D from P/1; prefill a#1 P for D/1

a worker of a fleet whose config forbids it
  config peer_prefixes=never
  enter S token_s=0.001 gives_prefixes=1 cached=40 state=draining -> peers S owner P; peers P reader S
  arrives a prompt=41 -> decode a#1 D from P/1; prefill a#1 P for D/1

a worker of a fleet whose pools have blocks of different sizes
  enter P block_size=8 token_s=0.001 gives_prefixes=1 -> peers P reader D; peers D owner P
  enter S token_s=0.001 gives_prefixes=1 cached=40 state=draining -> peers S owner P; peers P reader S
  arrives a prompt=41 -> decode a#1 D from P/1; prefill a#1 P for D/1

a worker that has failed the request
  enter P1 token_s=0.001 gives_prefixes=1 cached=40 -> peers P1 reader D; peers D owner P1
  arrives a prompt=41 -> decode a#1 D from P1/1; prefill a#1 P1 for D/1
  prefill_error a#1 TransferFailed x -> cancel a#1; decode a#2 D from P/2; prefill a#2 P for D/2
""",
    WORKERS,
)

test_a_reader = transcripts(
    """
a decode worker that computes the prompt takes blocks for all of it
  config local_prefill=auto
  lost P              -> peers D left P; peers S left P
  arrives a prompt=41 -> decode a#1 D reads 40 tokens of S/1; offer a#1 S to D/1 1..40 within 0.054 s
  load D              -> D 0.001 s, 1 sequences, 53 blocks

a prefill worker may read from the decode worker of the prompt
  reports S token_s=0.001 gives_prefixes=1
  reports P token_s=0.01 gives_prefixes=1
  # It may take half of the time that it saves.
  arrives a prompt=41 -> decode a#1 S from P/2; prefill a#1 P for S/2 reads 40 tokens of S/1
                      -> offer a#1 S to P/1 1..40 within 0.201 s
""",
    SOURCE,
)

test_the_first_read_from_a_source = transcripts(
    """
until it has ended no other request reads
  arrives b prompt=41            -> decode b#1 D from P/3; prefill b#1 P for D/3
  prefilled a#1 7 read_tokens=40 -> deliver a 0: 7
  arrives c prompt=41            -> decode c#1 D from P/5; prefill c#1 P for D/5 reads 40 tokens of S/4
                                 -> offer c#1 S to P/4 1..40 within 0.058 s
  arrives d prompt=41            -> decode d#1 D from P/7; prefill d#1 P for D/7 reads 40 tokens of S/6
                                 -> offer d#1 S to P/6 1..40 within 0.062 s

a source that brought nothing is not asked again for some time
  prefilled a#1 7 read_tokens=0 -> deliver a 0: 7
  arrives b prompt=41           -> decode b#1 D from P/3; prefill b#1 P for D/3

a reader that began no read for lack of room says nothing about its source
  prefilled a#1 7     -> deliver a 0: 7
  arrives b prompt=41 -> decode b#1 D from P/4; prefill b#1 P for D/4 reads 40 tokens of S/3
                      -> offer b#1 S to P/3 1..40 within 0.058 s
""",
    FIRST_READ,
)

test_a_source_that_fails = transcripts(
    """
it makes no offer and is not asked again
  prefix_refused b#1 S QueueFull
  reports P token_s=0.001 gives_prefixes=1
  arrives c prompt=41 -> decode c#1 D from P/5; prefill c#1 P for D/5

it is gone and gets no call before its next report
  reports S token_s=0.001 gives_prefixes=1
  prefix_refused b#1 S WorkerUnavailable
  reports P token_s=0.001 gives_prefixes=1
  arrives c prompt=41 -> decode c#1 D from P/5; prefill c#1 P for D/5

it has started again and is asked again
  prefix_refused b#1 S QueueFull
  lost S              -> peers P left S
  enter S token_s=0.001 gives_prefixes=1 cached=40 state=draining -> peers S owner P; peers P reader S
  arrives c prompt=41 -> decode c#1 D from P/6; prefill c#1 P for D/6 reads 40 tokens of S/5
                      -> offer c#1 S to P/5 1..40 within 0.058 s

a call with it has failed and it is not asked again
  # For another reader, that says nothing.
  prefill_error b#1 TransferFailed x -> cancel b#1; decode b#2 D reads 40 tokens of S/5
                                     -> offer b#2 S to D/5 1..40 within 0.058 s
  reports P token_s=0.001 gives_prefixes=1
  arrives c prompt=41 -> decode c#1 D from P/6; prefill c#1 P for D/6

a call with it has not begun and it is asked again
  prefill_error b#1 QueueFull x -> cancel b#1
  reports P token_s=0.001 gives_prefixes=1
  -> decode b#2 D from P/6; prefill b#2 P for D/6 reads 40 tokens of S/5; offer b#2 S to P/5 1..40 within 0.058 s
""",
    SECOND_READ,
)


test_a_request_that_moves = transcripts(
    """
its read has ended once the call of the worker that read returns
  enter D1 token_s=0.001 gives_prefixes=1
  enter S token_s=0.001 gives_prefixes=1 state=draining cached=40
  arrives a prompt=41 max_tokens=20 -> decode a#1 D1 reads 40 tokens of S/1; offer a#1 S to D1/1 1..40 within 0.054 s
  enter D2
  reports D2 takes_moves=1
  tokens_from a#1 0 7..10           -> deliver a 0: 7..10
  reports D1 draining takes_moves=1
  asks a#1 -> decode a#2 D2 from D1/2 behind 7..10 moves; move a#1 D1 to a#2 D2/2 45 tokens
  hands_over a#1 4
  ends a#1 handoff read_tokens=40
  cancelled a                       -> cancel a#2; fail a RequestCancelled: cancelled by the client
  lost D2
  reports D1 token_s=0.001 gives_prefixes=1
  arrives b prompt=41               -> decode b#1 D1 reads 40 tokens of S/3; offer b#1 S to D1/3 1..40 within 0.058 s
"""
)


def with_sources(*names: str) -> DrivenRouter:
    router = DrivenRouter(prefill=(), decode=())
    for name in ("P", "D", *names):
        state, cached = ("draining", 40) if name in names else ("serving", 0)
        router.enter(name, token_s=0.001, gives_prefixes=1, state=state, cached=cached)
    return router


def test_of_equal_sources_another_is_asked_while_one_is_busy_or_has_failed() -> None:
    """A policy prices four sources for a reader; those that it avoids are not among them."""
    router = with_sources(*(f"S{number}" for number in range(8)))
    for number in range(6):
        router.arrives(f"r{number}", prompt=41)
        router.now += 0.001
    assert len({offer.worker_id for offer in router.of(events.OfferPrefix)}) == 6


@pytest.mark.parametrize("num_routers", [1, 3])
def test_reads_and_hand_offs_take_their_links_once_for_each_router(num_routers: int) -> None:
    router = with_sources("S")
    others = ",".join(f"router-{number}:1:1" for number in range(1, num_routers))
    router.reports("D", token_s=0.001, gives_prefixes=1, routers=others)
    router.arrives("r", prompt=41)
    table, block_bytes = router.machine.workers, LAYOUT.block_bytes
    hand_off_s, read_s = 11 * block_bytes / UNKNOWN_BYTES_PER_S, MESSAGE_S + 10 * block_bytes / UNKNOWN_BYTES_PER_S
    links = [(table.chosen(name).link_until - router.now) / num_routers for name in ("S", "P", "D")]
    assert links == pytest.approx([read_s, read_s + hand_off_s, read_s + hand_off_s])


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


# ---- a disk


def test_a_disk_is_read_where_that_is_faster_than_computing() -> None:
    def read(cached: int = 0, **worker: Any) -> PrefixRead:
        return best(replace(WITH_DISK, **worker), cached, on_disk=80).read

    assert read()[:3] == ("P", 80, pytest.approx(0.02 + policy.DISK_READ_S))
    assert read(40)[:3] == ("P", 40, pytest.approx(0.01 + policy.DISK_READ_S))
    assert read(80) is NO_READ
    assert read(disk_bytes_per_s=2e8) is NO_READ, "0.1 s for 0.08 s"
    assert read(num_free_blocks=19) is NO_READ


def test_a_large_fleet_does_not_overlook_the_worker_with_the_disk() -> None:
    """Among more workers than are priced, it has slightly more prompt work than the others."""
    others = [(replace(IDLE, worker_id=f"P{number}"), 0) for number in range(3 * policy.MAX_TIMED)]
    busier = replace(WITH_DISK, backlog=(0.0,) * 12 + (0.01,), reported_at=0.0)
    question = RoutingQuestion(100, [*others, (busier, 0)], [(D, 0)], True, BLOCK, 0.0, (), {"P": 80})
    assert SecondsPolicy(NEVER).candidates(question)[0].prefill_worker == "P"


def test_the_faster_of_disk_and_peer_is_read() -> None:
    for disk_bytes_per_s, source in ((2e9, "P"), (5e8, "S")):
        both = replace(over(), block_size=BLOCK, disk_bytes_per_s=disk_bytes_per_s)
        assert best(both, 0, (OWNER, 80), on_disk=80).read.source == source


def test_reports_say_what_lies_on_disk_and_no_peer_is_asked_for_it() -> None:
    router = DrivenRouter(prefill=("P0",))
    load = replace(SERVING, step_cost=IDLE.cost, num_disk_blocks=10, disk_bytes_per_s=1e9)
    for name in ("P0", "D"):
        router.reports(name, token_s=0.001)
    hashes = tuple(hash_on_disk(each) for each in sequence_hashes(range(1, 42), LAYOUT.block_size))
    router.post(events.WorkerJoined("P1", ServiceRole.PREFILL, agent("P1"), hashes, load))
    assert [router.seen(action) for action in router.arrives("a", prompt=41)][1] == "prefill a#1 P1 for D/1"
    router.post(events.WorkerReported("P1", WorkerChanges(blocks=((hashes, False),))))
    actions = [router.seen(action) for action in router.arrives("b", prompt=41)]
    assert actions[1] == "prefill b#1 P0 for D/2", "the blocks have left the disk of the busier worker"
