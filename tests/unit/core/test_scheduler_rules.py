"""The rules of the scheduler, one sentence a test.

tests/property/test_scheduler.py has the laws of every step: decodes do not wait, limits hold, no block is written or
found before its tokens are computed, and every sequence ends.
"""

from __future__ import annotations

import pytest

from core.config import SchedulerConfig
from core.errors import InvalidRequest
from core.lifecycle import FinishReason
from tests.support.cached_blocks import reserved
from tests.unit.core.driving_scheduler import BLOCK_SIZE, EOS, Driven

# ---- rank


def test_lower_priority_values_go_first_then_earlier_arrivals() -> None:
    driven = Driven(max_running=1)
    driven.add("early", [2], arrival=1, priority=1, max_tokens=1)
    driven.add("late", [1], arrival=3, priority=1, max_tokens=1)
    driven.add("urgent", [3], arrival=4, priority=0, max_tokens=1)
    assert [event.sequence_id for event in driven.run_until_idle()] == ["urgent", "early", "late"]


def test_a_prompt_that_comes_first_and_does_not_fit_is_not_overtaken() -> None:
    driven = Driven(num_blocks=6)
    driven.add("running", range(1, 17), arrival=1, max_tokens=4)
    driven.step()
    driven.add("large", range(31, 47), arrival=2, max_tokens=1)
    driven.add("small", [1, 2], arrival=3, max_tokens=1, priority=1)
    assert driven.step() == {"running": 1}
    ends = [event.sequence_id for event in driven.run_until_idle() if event.finish_reason is not None]
    assert ends == ["running", "large", "small"]


# ---- refusals


def test_a_sequence_may_fill_the_pool_and_one_more_token_is_refused() -> None:
    driven = Driven(num_blocks=3)
    with pytest.raises(InvalidRequest) as refused:
        driven.add("one too many", range(1, 7), max_tokens=3 * BLOCK_SIZE + 2 - 6)
    assert refused.value.field == "max_tokens"
    driven.add("just fits", range(1, 7), max_tokens=3 * BLOCK_SIZE + 1 - 6)
    assert driven.run_until_idle()[-1].finish_reason is FinishReason.LENGTH


def test_a_prefill_only_sequence_needs_blocks_only_for_its_prompt() -> None:
    driven = Driven(num_blocks=3)
    driven.add("prefill only", range(1, 13), max_tokens=1000, sample_limit=1)
    assert driven.run_until_idle()[-1].finish_reason is FinishReason.HANDOFF


# ---- the prefix cache


def test_blocks_filled_by_decoding_are_cached() -> None:
    driven = Driven()
    driven.add("talk", [1, 2, 3], max_tokens=6)
    driven.run_until_idle()
    follow_up = driven.add("follow-up", [1, 2, 3, *[9] * 6, 5], max_tokens=1)
    driven.step()
    assert follow_up.num_cached_tokens == 8


@pytest.mark.parametrize("in_a_step", [False, True])
def test_invalidated_blocks_are_not_registered_again_by_the_sequence_that_holds_them(in_a_step: bool) -> None:
    driven = Driven()
    driven.add("before", range(1, 10), max_tokens=1)
    driven.run_until_idle()
    holder = driven.add("holder", range(1, 10), max_tokens=12)
    plan = driven.begin()
    if not in_a_step:
        driven.end(plan)
    driven.pool.invalidate(holder.block_table)
    if in_a_step:
        driven.end(plan)
    driven.run_until_idle()
    first, second, third, *_ = [block.sequence_hash for block in holder.full_blocks(BLOCK_SIZE)]
    assert not {first, second, third} & set(driven.pool.registered_hashes()), "the third was computed from the others"


# ---- preemption


def test_a_preempted_sequence_finds_its_own_blocks_in_the_cache() -> None:
    driven = Driven(num_blocks=7)
    driven.add("first", range(1, 8), arrival=1, max_tokens=10)
    second = driven.add("second", range(21, 34), arrival=2, max_tokens=10)
    while not second.num_preemptions:
        driven.step()
    cached_before = second.num_cached_tokens
    while not second.block_table and second.finish_reason is None:
        plan = driven.begin()
        resumed = [chunk for chunk in plan.chunks if chunk.sequence.sequence_id == "second"]
        driven.end(plan)
    assert resumed[0].start > 0
    assert second.num_cached_tokens == cached_before == 0, "blocks of an earlier run count as cached tokens"


def test_a_prompt_starts_once_the_pool_has_blocks_for_all_of_it_and_a_next_token_of_each_running_sequence() -> None:
    driven = Driven(num_blocks=6, budget=8)
    driven.add("runs", [1, 2], max_tokens=5)
    driven.step()
    driven.add("prompt", range(21, 41), arrival=1, max_tokens=1)  # 5 blocks
    assert [driven.step() for _ in range(4)] == [{"runs": 1}] * 4, "5 blocks of the prompt, 1 of a next token, of 5"
    assert [driven.step() for _ in range(3)] == [{"prompt": 8}, {"prompt": 8}, {"prompt": 4}]
    assert driven.scheduler.num_preemptions == 0


def test_a_prompt_that_waits_for_many_blocks_is_passed_by_short_ones_only_until_it_is_due() -> None:
    driven = Driven(num_blocks=8, budget=64, max_running=8, max_waiting=64)
    driven.add("short-0", [101, 102], arrival=0, max_tokens=30)
    driven.step()
    long = driven.add("long", range(1, 25), arrival=1, max_tokens=1)  # 6 blocks
    for number in range(1, 400):
        if number % 2:
            driven.add(f"short-{number}", [number % 90 + 1, 2], arrival=number + 1, max_tokens=8)
        driven.step()
        if long.finish_reason is not None:
            break
    assert 2 < number < 100
    assert long.num_preemptions == 0


def test_a_prompt_starts_with_fewer_blocks_where_no_sequence_runs() -> None:
    driven = Driven(num_blocks=6, budget=8)
    reserved(driven.pool, 4)
    driven.add("prompt", range(21, 41), max_tokens=1)
    assert driven.step() == {"prompt": 8}


def test_the_lowest_ranked_sequence_waits_for_blocks_and_keeps_its_own() -> None:
    driven = Driven(num_blocks=5)
    driven.add("first", range(1, 6), arrival=1, max_tokens=4)  # 5 .. 8 slots, 2 blocks
    second = driven.add("second", range(21, 28), arrival=2, max_tokens=4)  # 7 .. 10 slots, wants a third block
    driven.step()
    taken = reserved(driven.pool, 1)
    driven.step()
    assert driven.step() == {"first": 1}, "no sequence of lower rank than `second` has blocks"
    assert len(second.block_table) == 2
    driven.pool.cancel_reservation(taken)
    driven.run_until_idle()
    assert second.num_preemptions == 0


def test_a_chunk_shrinks_to_the_available_blocks() -> None:
    driven = Driven(num_blocks=6, budget=8)
    sequence = driven.add("prompt", range(1, 21), max_tokens=1)
    driven.step()
    taken = reserved(driven.pool, 3)
    assert driven.step() == {"prompt": 4}
    assert driven.scheduler.schedule() is None, "the missing blocks are reserved for a pull"
    driven.pool.cancel_reservation(taken)
    assert driven.step() == {"prompt": 8}
    assert sequence.finish_reason is FinishReason.LENGTH


def test_no_sequence_is_admitted_in_a_step_that_lacked_blocks() -> None:
    driven = Driven(num_blocks=7, budget=8)
    driven.add("prompt", range(1, 21), arrival=2, priority=1, max_tokens=1)
    driven.step()
    assert driven.pool.reserve(3) is not None
    driven.add_pulled("pulled", range(41, 44), arrival=1)
    assert driven.step() == {"pulled": 1}, "a pulled sequence needs little, and has to run to free its blocks"
    driven.add("new", [51, 52], arrival=3, priority=2)
    assert driven.step() == {"pulled": 1}, "neither prompt has a block to go on in"


def test_waiting_sequences_are_preempted_only_if_their_blocks_are_enough() -> None:
    driven = Driven(num_blocks=8, max_running=1)
    outside = reserved(driven.pool, 4)
    driven.add("large", range(41, 65), arrival=1, max_tokens=1)
    pulled = driven.add_pulled("pulled", range(1, 8), arrival=2)
    assert driven.scheduler.schedule() is None
    assert len(pulled.block_table) == 2, "preempted although its blocks are too few"
    driven.pool.cancel_reservation(outside)
    assert driven.step().keys() == {"large"}
    assert pulled.num_preemptions == 0
    driven.run_until_idle()


# ---- hand-offs


def test_a_running_sequence_without_blocks_yields_to_a_pulled_sequence_of_higher_rank() -> None:
    """Otherwise both wait for ever: the first for blocks, the second for admission."""
    driven = Driven(num_blocks=4)
    running = driven.add("running", range(1, 8), arrival=1, priority=1)
    driven.step()
    taken = reserved(driven.pool, 2)
    driven.step()  # computes position 7, which fills its second block
    driven.pool.cancel_reservation(taken)
    pulled = driven.add_pulled("pulled", range(21, 29), arrival=2, priority=0, max_tokens=6)
    assert driven.step() == {"pulled": 1}
    assert running.num_preemptions == 1
    driven.run_until_idle()
    assert running.finish_reason is pulled.finish_reason is FinishReason.LENGTH


# ---- ends


def test_an_end_of_sequence_token_stops_unless_it_is_ignored_and_is_no_stop_token() -> None:
    driven = Driven()
    driven.next_token = EOS
    driven.add("stops", [1], max_tokens=3)
    driven.add("goes on", [2], max_tokens=3, ignore_eos=True)
    driven.add("stops too", [3], max_tokens=3, ignore_eos=True, stop_token_ids=frozenset({EOS}))
    ends = {e.sequence_id: (e.index, e.finish_reason) for e in driven.run_until_idle() if e.finish_reason}
    stop = (0, FinishReason.STOP)
    assert ends == {"stops": stop, "goes on": (2, FinishReason.LENGTH), "stops too": stop}


def test_a_sequence_that_was_not_computed_ends_alone_and_its_blocks_enter_no_cache() -> None:
    driven = Driven(max_running=3)
    for arrival, name in enumerate(("a", "b", "c")):
        driven.add(name, range(10 * arrival + 1, 10 * arrival + 9), arrival=arrival)
    plan = driven.begin()
    failing = driven.scheduler.get("b")
    assert failing is not None
    assert [event.sequence_id for event in driven.end(plan, failed=["b"])] == ["a", "c"]
    assert failing.finish_reason is FinishReason.ERROR
    assert failing.block_table == []
    assert driven.scheduler.get("b") is None
    assert driven.scheduler.num_prefilled_tokens == 16
    assert len(driven.pool.registered_hashes()) == 4, "two full blocks of each of the others"
    assert driven.step() == {"a": 1, "c": 1}


def test_a_pulled_prompt_waits_while_more_run_than_the_new_limit() -> None:
    driven = Driven(max_running=3)
    for name in "abc":
        driven.add(name, [1, 2])
    driven.step()
    driven.scheduler.set_config(SchedulerConfig(max_batched_tokens=64, max_running=1))
    for arrival, name in enumerate("defg", start=1):
        driven.add_pulled(name, [1, 2], arrival=arrival)
    assert driven.step() == {"a": 1, "b": 1, "c": 1}


# ---- views


def test_a_view_belongs_to_one_block_table_that_never_shrinks() -> None:
    driven = Driven(num_blocks=3)
    driven.add("first", range(1, 5), max_tokens=4)
    second = driven.add("second", range(21, 25), arrival=1, max_tokens=4)
    driven.step()
    driven.pool.reserve(1)
    view, table = second.view, list(second.block_table)
    driven.step()
    assert second.num_preemptions == 1
    assert view.block_table == table
    assert second.view is not view
    assert second.view.token_ids is view.token_ids is second.token_ids
