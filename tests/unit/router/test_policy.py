"""The policy prices every way that a request may take in seconds, chooses the cheapest, and spreads near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.compose import load_policy
from core.config import RouterConfig
from core.cost.step_cost import StepCost
from core.errors import ConfigError
from core.lifecycle import RequestPath
from core.paths import Lane, PathState, PathStatus
from core.scheduling.worker_load import NUM_SIZE_CLASSES, size_class
from router.routing import policy
from router.routing.policy import SecondsPolicy, move_target, reason_for
from router.routing.question import MESSAGE_S, UNKNOWN_BYTES_PER_S, Candidate, Option, RoutingQuestion, WorkerView

BLOCK = 4
COST = StepCost(step_s=0.01, sequence_s=0.001, context_s=1e-6, token_s=0.001, pair_s=0.0)
IDLE = WorkerView("w", num_sequences=0, num_dispatched=0, cost=COST, max_step_tokens=512)
AUTO, NEVER = RouterConfig(local_prefill="auto"), RouterConfig(local_prefill="never")


def view(name: str, cached_tokens: int = 0, **differences: object) -> Option:
    return replace(IDLE, worker_id=name, **differences), cached_tokens  # type: ignore[arg-type]


def backlog(*work_s: float) -> tuple[float, ...]:
    """The prompt work of a worker that has these prompts to compute."""
    seconds = [0.0] * NUM_SIZE_CLASSES
    for work in work_s:
        seconds[size_class(work)] += work
    return tuple(seconds)


def decoding(num_streams: int, context: int = 0) -> dict[str, int]:
    return {"num_decoding": num_streams, "num_sequences": num_streams, "decode_context": context}


def ask(
    num_tokens: int, prefill: Sequence[Option], decode: Sequence[Option], config: RouterConfig = NEVER, **asked: Any
) -> list[Candidate]:
    question = RoutingQuestion(num_tokens, prefill, decode, asked.pop("alive", True), BLOCK, **asked)
    found = SecondsPolicy(config).candidates(question)
    assert SecondsPolicy(config).choose(question) == (found[0] if found else None)
    return found


def pair(num_tokens: int, prefill: Option, decode: Option, now: float = 0.0) -> Candidate:
    (found,) = ask(num_tokens, [prefill], [decode], now=now)
    return found


def alone(num_tokens: int, decode: Option, now: float = 0.0) -> Candidate:
    (found,) = ask(num_tokens, [], [decode], AUTO, alive=False, now=now)
    return found


# ---- the terms of a pair


def test_an_idle_pair_needs_the_time_of_its_steps() -> None:
    found = pair(1000, view("p"), view("d"))
    assert found.prefill_s == pytest.approx(1.0 + 2 * COST.step_s), "two steps of at most 512 tokens"
    assert (found.queue_s, found.room_wait_s, found.num_streams) == (0.0, 0.0, 0)
    assert (found.uncached_tokens, found.transfer_blocks, found.path) == (1000, 250, RequestPath.DISAGGREGATED)
    assert found.first_token_s == pytest.approx(found.prefill_s + MESSAGE_S)


def test_cached_tokens_are_not_computed_but_attended_to() -> None:
    attentive = replace(COST, pair_s=1e-6)
    found = pair(200, view("p", cached_tokens=100, cost=attentive), view("d"))
    assert found.prefill_s == pytest.approx(0.1 + 100 * 150e-6 + COST.step_s)
    assert (found.cached_tokens, found.uncached_tokens) == (100, 100)


STEP_S = 0.512 + COST.step_s  # of a full step
DONE_S = 0.4 * 0.512 / STEP_S  # the work that is done in 0.4 s


@pytest.mark.parametrize(
    ("num_tokens", "busy", "now", "queue_s"),
    [
        (1000, {"backlog": backlog(0.2, 0.3)}, 0.0, 0.5),  # shorter prompts go first
        (100, {"backlog": backlog(60.0)}, 0.0, STEP_S),  # a longer one fills the step that runs
        (100, {"backlog": backlog(60.0), "reported_at": 1.0}, 1.5, STEP_S - 0.5),  # until it ends
        (1000, {"backlog": backlog(0.2, 0.3), "reported_at": 7.0}, 7.4, 0.5 - DONE_S),
        (1000, {"backlog": backlog(0.2, 0.3), "reported_at": 7.0}, 9.0, 0.0),
        (1000, {"backlog": backlog(0.2), "arriving": backlog(0.3)}, 50.0, 0.3),  # work on the way
    ],
)
def test_a_prompt_waits_for_the_prompts_that_go_first_and_the_step_that_runs(
    num_tokens: int, busy: dict[str, Any], now: float, queue_s: float
) -> None:
    assert pair(num_tokens, view("p", **busy), view("d"), now).queue_s == pytest.approx(queue_s)


def path(bytes_per_s: float, expected: float = 0.0, latency_s: float = 0.0) -> dict[str, PathStatus]:
    return {"agent-p": PathStatus("agent-p", PathState.FINE, Lane.RDMA, bytes_per_s, expected, latency_s)}


@pytest.mark.parametrize(
    ("paths", "transfer_s"),
    [
        (path(1e6, latency_s=0.25), 0.25 + 128 * 1000 / 1e6),  # of the last chunk: 512 tokens in blocks of 4
        (path(1e4), 256 * 1000 / 1e4 - (1.024 + 2 * COST.step_s)),  # it lags behind the prefill
        (path(0.0, expected=2e6), 128 * 1000 / 2e6),  # the bandwidth of the hardware
        ({}, 128 * 1000 / UNKNOWN_BYTES_PER_S),
    ],
)
def test_a_transfer_costs_what_the_prefill_does_not_hide(paths: dict[str, PathStatus], transfer_s: float) -> None:
    found = pair(1024, view("p", agent_name="agent-p"), view("d", block_bytes=1000, paths=paths))
    assert found.transfer_s == pytest.approx(transfer_s)


def test_a_transfer_that_ends_within_the_step_limit_costs_nothing() -> None:
    owner = view("p", agent_name="agent-p")
    exposed = pair(1024, owner, view("d", block_bytes=1000, paths=path(1e6))).transfer_s
    for limit_s, late_s in ((exposed + 0.01, 0.0), (exposed - 0.01, 0.01)):
        found = pair(1024, owner, view("d", block_bytes=1000, paths=path(1e6), step_limit_s=limit_s))
        assert found.transfer_s == pytest.approx(late_s, abs=1e-9)
    assert pair(1024, owner, view("d", 1024, block_bytes=1000)).transfer_s == 0.0, "no block is missing"


def test_a_full_decode_worker_is_waited_for_after_the_prefill() -> None:
    full = view("d", num_free_blocks=50, blocks_released_per_s=100.0)
    found = pair(1000, view("p"), full)
    assert found.room_wait_s == pytest.approx(2.0 - found.prefill_s), "200 blocks at 100/s, minus the prefill"
    assert pair(1000, view("p"), view("d", num_free_blocks=50)).room_wait_s == policy.UNKNOWN_ROOM_WAIT_S
    assert pair(200, view("p"), full).room_wait_s == 0.0
    assert found.first_token_s < found.room_wait_s + found.prefill_s, "the first token comes from the prefill worker"


def test_a_new_stream_makes_the_steps_of_all_sequences_of_the_decode_worker_longer() -> None:
    found = pair(1000, view("p"), view("d", **decoding(8)))
    assert (found.gap_s, found.num_streams) == (pytest.approx(0.001 + 1000 * 1e-6), 8)


# ---- the decode worker alone


def test_the_decode_worker_alone_needs_no_transfer_but_shares_its_steps() -> None:
    found = alone(100, view("d", **decoding(4, 1000)))
    step_s = 0.01 + 4 * 0.001 + 1000 * 1e-6
    assert found.queue_s == pytest.approx(step_s), "the step that runs"
    assert found.prefill_s == pytest.approx(step_s + 0.1)
    assert (found.transfer_s, found.transfer_blocks, found.path) == (0.0, 0, RequestPath.LOCAL)
    assert found.num_streams == 4
    assert alone(8, view("d", cached_tokens=8)).uncached_tokens == 1, "the last token is always computed"


def test_streams_feel_only_what_a_step_with_the_prompt_exceeds_the_limit() -> None:
    stream_s = 0.001 + 100 * 1e-6
    within, beyond = view("d", step_limit_s=0.034, **decoding(4)), view("d", step_limit_s=0.02, **decoding(4))
    assert alone(100, within).gap_s == pytest.approx(stream_s)
    assert alone(100, beyond).gap_s == pytest.approx(stream_s + 0.016 - 0.006), "16 tokens at least, 6 ms to spare"
    assert alone(100, view("d", **decoding(4))).gap_s == pytest.approx(stream_s + 0.1), "no limit: the whole chunk"
    assert alone(100, view("d")).gap_s == pytest.approx(stream_s), "no streams"


def test_a_step_limit_makes_a_prompt_on_the_decode_worker_slower() -> None:
    limited = view("d", step_limit_s=0.034, **decoding(4))
    assert alone(100, limited).prefill_s == pytest.approx(0.1 + 5 * 0.014), "5 steps of 20 tokens"
    assert alone(100, view("d", step_limit_s=0.034)).prefill_s == alone(100, view("d")).prefill_s, "no stream, no limit"


def test_a_cached_block_that_the_prompt_hits_makes_no_room_for_another() -> None:
    room = {"num_free_blocks": 10, "num_cached_blocks": 8, "blocks_released_per_s": 2.0}
    assert pair(48, view("p"), view("d", 24, **room)).room_wait_s == pytest.approx(1.0 - 0.058), "6 hits and 6 others"
    assert pair(40, view("p"), view("d", 24, **room)).room_wait_s == 0.0
    shared = view("d", 24, **room | {"num_cached_blocks": 0})
    assert pair(48, view("p"), shared).room_wait_s == 0.0, "sequences hold the blocks of the hits"


def test_a_worker_is_charged_for_what_the_prompt_drives_out_of_its_cache_as_often_as_prompts_are_cached() -> None:
    """48 tokens need 12 blocks: 2 are empty, and 10 push out 40 tokens. With 24 tokens cached, 6 blocks are needed."""
    full = {"num_free_blocks": 22, "num_cached_blocks": 20}
    (found,) = ask(48, [view("p", **full)], [view("d", 24, **full)], reuse_share=0.25)
    assert found.evict_s == pytest.approx(0.25 * (10 + 4) * BLOCK * COST.token_s)
    assert found.cost - found.evict_s == pytest.approx(found.prefill_s)
    holder, empty = view("p1", 24, **full), view("p2", **full | {"num_cached_blocks": 0})
    first, second = ask(48, [holder, empty], [view("d")], reuse_share=1.0)
    assert (first.prefill_worker, first.evict_s) == ("p1", pytest.approx(16 * COST.token_s))
    assert (second.prefill_worker, second.evict_s) == ("p2", 0.0)


def test_room_is_waited_for_before_the_decode_worker_computes() -> None:
    found = alone(100, view("d", num_free_blocks=5, blocks_released_per_s=10.0))
    assert found.room_wait_s == pytest.approx(2.0)
    assert found.first_token_s == pytest.approx(2.0 + found.prefill_s + MESSAGE_S)


# ---- the choice


def test_an_idle_decode_worker_computes_a_prompt_while_the_prefill_worker_is_busy() -> None:
    idle, busy = view("p"), view("p", arriving=backlog(*[0.05] * 20))
    assert ask(100, [busy], [view("d")], AUTO)[0].path is RequestPath.LOCAL
    assert ask(100, [idle], [view("d", **decoding(8, 8000))], AUTO)[0].path is RequestPath.DISAGGREGATED
    assert ask(100, [busy], [view("d")], NEVER)[0].path is RequestPath.DISAGGREGATED


def test_without_a_prefill_worker_alive_any_prompt_is_computed_on_the_decode_worker() -> None:
    (chosen,) = ask(100, [], [view("d")], NEVER, alive=False)
    assert chosen.path is RequestPath.LOCAL
    assert "no prefill worker" in reason_for(chosen, False)


def test_of_near_ties_the_one_with_the_fewest_requests_of_this_router_wins() -> None:
    almost = replace(COST, token_s=0.00101)
    prefill = [view("p1", num_dispatched=2), view("p2", cost=almost)]
    chosen = ask(100, prefill, [view("d1", num_dispatched=1), view("d2")])[0]
    assert (chosen.prefill_worker, chosen.decode_worker) == ("p2", "d2")


@pytest.mark.parametrize(
    ("better", "others"),
    [({}, {"num_free_blocks": 50}), ({}, decoding(8)), ({}, {"num_dispatched": 1}), ({"cached_tokens": 600}, {})],
)
def test_among_more_decode_workers_than_are_paired_the_cheapest_is_found(
    better: dict[str, Any], others: dict[str, Any]
) -> None:
    decode = [view(f"d{number}", block_bytes=10**7, **others) for number in range(policy.MAX_PAIRED + 2)]
    found = ask(800, [view("p")], [*decode, view("dz", block_bytes=10**7, **better)])
    assert (found[0].decode_worker, len(found)) == ("dz", policy.MAX_PAIRED)


@pytest.mark.parametrize(
    ("max_total_tokens", "of_source", "reserve_share", "needed"),
    [
        (29, {}, 0.0, 7),  # the last token needs no slot
        (30, {}, 0.0, 8),
        (29, {"cached_tokens": 8}, 0.0, 5),
        (29, {"cached_tokens": 8, "num_cached_blocks": 1}, 0.0, 6),
        (29, {}, 0.1, 14),  # and 6.4 of 64
    ],
)
def test_a_sequence_moves_only_where_its_blocks_up_to_its_end_are_free(
    max_total_tokens: int, of_source: dict[str, int], reserve_share: float, needed: int
) -> None:
    for num_free, num_found in ((needed - 1, 0), (needed, 1)):
        target = view("d", num_free_blocks=num_free, num_blocks=64, **of_source)
        question = RoutingQuestion(12, [], [target], False, BLOCK)
        found = move_target(question, IDLE, max_total_tokens, reserve_share)
        assert (found is not None) == num_found


views = st.builds(
    lambda queued, arriving, streams, cached, dispatched, room: (
        dict(
            backlog=backlog(*queued), arriving=backlog(*arriving), num_dispatched=dispatched, num_free_blocks=room,
            blocks_released_per_s=5.0, step_limit_s=0.05, block_bytes=10**6, **decoding(streams, streams * 100),
        ),
        cached,
    ),
    st.lists(st.floats(0.001, 5.0), max_size=3), st.lists(st.floats(0.001, 5.0), max_size=2), st.integers(0, 40),
    st.integers(0, 200), st.integers(0, 2), st.integers(-20, 100),
)  # fmt: skip
drawn_views = st.lists(views, max_size=2 * policy.MAX_PAIRED)
Drawn = list[tuple[dict[str, object], int]]


@given(drawn_views, drawn_views, st.integers(1, 2000), st.sampled_from([AUTO, NEVER]), st.floats(0.0, 3.0))
def test_the_choice_is_near_the_cheapest_and_no_term_is_negative(
    prefill: Drawn, decode: Drawn, num_tokens: int, config: RouterConfig, now: float
) -> None:
    of_p, of_d = (
        [view(f"{role}{number}", min(cached, num_tokens), **fields) for number, (fields, cached) in enumerate(drawn)]
        for role, drawn in (("p", prefill), ("d", decode))
    )
    found = ask(num_tokens, of_p, of_d, config, now=now)
    assert bool(found) == (bool(decode) and (bool(prefill) or config is AUTO))
    for candidate in found:
        terms = (candidate.queue_s, candidate.prefill_s, candidate.transfer_s, candidate.room_wait_s, candidate.gap_s)
        assert min(terms) >= 0.0
        assert candidate.prefill_s >= candidate.uncached_tokens * COST.token_s
        assert candidate.cost >= found[0].cost / 1.03 - 0.001
    assert [c.order for c in found[1:]] == sorted(c.order for c in found[1:])


@given(work=st.lists(st.floats(0.001, 3.0), max_size=6), more=st.floats(0.001, 3.0), num_tokens=st.integers(1, 1000))
def test_more_work_never_makes_the_first_token_earlier(work: list[float], more: float, num_tokens: int) -> None:
    before = pair(num_tokens, view("p", arriving=backlog(*work)), view("d"))
    after = pair(num_tokens, view("p", arriving=backlog(*work, more)), view("d"))
    assert after.first_token_s >= before.first_token_s - 1e-9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", r"\[router\] policy: cannot import no_such_module"),
        ("json:no_such_function", "json has no function no_such_function"),
        ("builtins:repr", "builtins:repr must return a Policy, its object has no compared"),
    ],
)
def test_a_wrong_name_of_a_policy_is_an_error_of_the_config(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(replace(RouterConfig(), policy=name))
