"""The policy chooses the candidate with the lowest cost, and spreads ties."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from core.config import RouterConfig
from core.lifecycle import RequestPath
from router.policy import MAX_WORKERS_COMPARED, Candidate, Option, Policy, WorkerView, reason_for
from router.prefix_index import PrefixIndex

BLOCK = 4
CONFIG = RouterConfig(local_prefill_tokens=16)
IDLE = WorkerView("w", num_queued_tokens=0, num_sequences=0, num_dispatched=0)


def view(name: str, cached_tokens: int = 0, **differences: int) -> Option:
    return replace(IDLE, worker_id=name, **differences), cached_tokens  # type: ignore[arg-type]


def best(
    num_tokens: int,
    prefill: list[Option],
    decode: list[Option],
    alive: bool = True,
    config: RouterConfig = CONFIG,
) -> Candidate:
    policy = Policy(num_tokens, prefill, decode, alive, config, BLOCK)
    chosen = policy.choose()
    assert chosen is not None
    assert chosen == policy.candidates()[0]
    return chosen


def candidates(num_tokens: int, prefill: list[Option], decode: list[Option], alive: bool) -> list[Candidate]:
    return Policy(num_tokens, prefill, decode, alive, CONFIG, BLOCK).candidates()


def test_a_cached_prefix_is_worth_a_shorter_queue() -> None:
    warm, cold = view("warm", num_queued_tokens=50, cached_tokens=80), view("cold")
    assert best(100, [warm, cold], [view("d")]).prefill_worker == "warm"


def test_a_long_queue_is_worth_more_than_a_cached_prefix() -> None:
    warm, cold = view("warm", num_queued_tokens=90, cached_tokens=80), view("cold")
    assert best(100, [warm, cold], [view("d")]).prefill_worker == "cold"


def test_the_pair_is_chosen_jointly_by_the_sum_of_its_terms() -> None:
    found = candidates(
        100,
        [view("p1", num_queued_tokens=40), view("p2")],
        [view("d1", num_sequences=9), view("d2", cached_tokens=40)],
        True,
    )
    assert [(c.prefill_worker, c.decode_worker) for c in found] == [
        ("p2", "d2"),
        ("p1", "d2"),
        ("p2", "d1"),
        ("p1", "d1"),
    ]
    assert found[0].cost == 0 + 100 + 15 + 0 + 32  # queue, uncached, blocks d2 lacks, sequences, the dispatch
    assert (found[0].uncached_tokens, found[0].transfer_blocks, found[0].path) == (100, 15, RequestPath.DISAGGREGATED)


def test_a_decode_worker_that_holds_the_prefix_saves_its_transfer() -> None:
    assert best(100, [view("p")], [view("d1"), view("d2", cached_tokens=96)]).decode_worker == "d2"


def test_few_uncached_tokens_are_computed_on_the_decode_worker() -> None:
    chosen = best(100, [view("p")], [view("d", cached_tokens=88)])
    assert (chosen.prefill_worker, chosen.uncached_tokens, chosen.path) == (None, 12, RequestPath.LOCAL)
    assert "12 uncached tokens" in reason_for(chosen, True)


def test_a_busy_decode_worker_leaves_even_a_short_prompt_to_the_prefill_worker() -> None:
    assert best(10, [view("p")], [view("d", num_queued_tokens=500)]).prefill_worker == "p"


def test_a_long_prompt_waits_for_a_prefill_worker_with_room() -> None:
    assert candidates(100, [], [view("d")], True) == []


def test_without_a_prefill_worker_alive_any_prompt_is_computed_on_the_decode_worker() -> None:
    chosen = best(100, [], [view("d")], alive=False)
    assert chosen.path is RequestPath.LOCAL
    assert "no prefill worker" in reason_for(chosen, False)


def test_without_a_decode_worker_there_is_no_candidate() -> None:
    assert candidates(10, [view("p")], [], True) == []
    assert Policy(10, [view("p")], [], True, CONFIG, BLOCK).choose() is None


def test_the_last_token_is_always_computed() -> None:
    assert best(8, [view("p")], [view("d", cached_tokens=8)]).uncached_tokens == 1


def test_of_equal_candidates_the_one_with_the_fewest_requests_of_this_router_wins() -> None:
    chosen = best(100, [view("p1", num_dispatched=2), view("p2")], [view("d1", num_dispatched=1), view("d2")])
    assert (chosen.prefill_worker, chosen.decode_worker) == ("p2", "d2")


@given(data=st.data(), num_tokens=st.integers(1, 200), alive=st.booleans())
def test_the_choice_is_the_first_of_all_pairs_and_of_all_workers_alone(
    data: st.DataObject, num_tokens: int, alive: bool
) -> None:
    """Against a model that makes and sorts every candidate."""

    def draw_options(name: str) -> list[Option]:
        counts = st.tuples(st.integers(0, 60), st.integers(0, 4), st.integers(0, 2), st.integers(0, num_tokens))
        drawn = data.draw(st.lists(counts, max_size=2 * MAX_WORKERS_COMPARED))
        return [
            view(f"{name}{number}", cached, num_queued_tokens=queued, num_sequences=running, num_dispatched=dispatched)
            for number, (queued, running, dispatched, cached) in enumerate(drawn)
        ]

    prefill, decode = draw_options("p"), draw_options("d")
    every: list[Candidate] = []
    for p, d in product(prefill, decode):
        every += [c for c in Policy(num_tokens, [p], [d], True, CONFIG, BLOCK).candidates() if c.prefill_worker]
    for d in decode:
        every += Policy(num_tokens, [], [d], alive, CONFIG, BLOCK).candidates()
    every.sort(key=lambda candidate: candidate.order)
    policy = Policy(num_tokens, prefill, decode, alive, CONFIG, BLOCK)
    assert policy.choose() == (every[0] if every else None)
    assert policy.candidates()[:1] == every[:1]


def test_requests_follow_their_cached_prefix_unless_the_other_worker_is_less_busy() -> None:
    """Each worker caches the blocks (A to G) that it gets."""
    index = PrefixIndex()
    queued = {"a": 0, "b": 0}

    def route(*blocks: str) -> str:
        names = [ord(block) for block in blocks]
        matched = index.match(names)
        views = [view(name, BLOCK * matched.get(name, 0), num_queued_tokens=queued[name]) for name in ("a", "b")]
        always_remote = RouterConfig(local_prefill_tokens=0)
        worker = best(BLOCK * len(blocks), views, [view("d")], config=always_remote).prefill_worker
        assert worker is not None
        queued[worker] += BLOCK * (len(blocks) - matched.get(worker, 0))
        index.store(worker, names)
        return worker

    assert route("A", "B", "C", "D") == "a", "equal costs: the first by name"
    assert route("E", "F") == "b", "worker a is busy"
    assert route("A", "B", "C", "D", "G") == "a", "four blocks cached outweigh two blocks more queued"
    assert route("A", "E") == "b", "one cached block does not"
