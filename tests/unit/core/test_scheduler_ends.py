"""The ends of sequences and steps: one reason, no token afterwards, and every block released."""

from __future__ import annotations

import pytest

from core.lifecycle import FinishReason
from core.scheduling.block_pool import Column
from core.step import SampledToken, StepOutput
from tests.unit.core.driving_scheduler import EOS, Driven, make_sequence


def test_an_end_of_sequence_token_stops_unless_it_is_ignored() -> None:
    driven = Driven()
    driven.next_token = EOS
    driven.add("stops", [1], max_tokens=3)
    driven.add("goes on", [2], max_tokens=3, ignore_eos=True)
    ends = {e.sequence_id: (e.index, e.finish_reason) for e in driven.run_until_idle() if e.finish_reason}
    assert ends == {"stops": (0, FinishReason.STOP), "goes on": (2, FinishReason.LENGTH)}


def test_a_stop_token_stops_even_if_the_end_of_sequence_is_ignored() -> None:
    driven = Driven()
    driven.add("stops", [1], max_tokens=3, ignore_eos=True, stop_token_ids=frozenset({driven.next_token}))
    assert [event.finish_reason for event in driven.run_until_idle()] == [FinishReason.STOP]


def test_a_resumed_request_continues_at_its_next_index() -> None:
    driven = Driven()
    sequence = make_sequence("resumed", [1, 2, 3], max_tokens=4)
    sequence.token_ids += [5, 6]
    driven.scheduler.add(sequence)
    assert [event.index for event in driven.run_until_idle()] == [2, 3]


def test_an_aborted_sequence_keeps_its_blocks_until_the_step_in_flight_has_ended() -> None:
    driven = Driven()
    sequence = driven.add("aborted", range(1, 8))
    plan = driven.begin()
    assert driven.scheduler.abort("aborted")
    assert driven.pool.ledger()[Column.HELD] == len(sequence.block_table) == 2
    assert driven.end(plan) == [], "no token comes after the end"
    assert driven.pool.ledger()[Column.HELD] == 0
    assert driven.scheduler.get("aborted") is None


def test_an_aborted_sequence_that_is_not_in_the_step_leaves_at_once() -> None:
    driven = Driven(max_running=1)
    driven.add("running", [1])
    driven.add_pulled("waiting", range(1, 8), arrival=5)
    plan = driven.begin()
    assert driven.scheduler.abort("waiting")
    assert driven.scheduler.get("waiting") is None
    assert driven.pool.ledger()[Column.HELD] == 1
    driven.end(plan)


def test_a_sequence_that_has_ended_cannot_be_aborted() -> None:
    driven = Driven()
    driven.add("a", [1])
    driven.begin()
    assert driven.scheduler.abort("a")
    assert not driven.scheduler.abort("a")
    assert not driven.scheduler.abort("unknown")


def test_a_failed_step_ends_only_its_own_sequences() -> None:
    driven = Driven(max_running=2)
    for name in ("a", "b", "c"):
        driven.add(name, range(1, 8))
    driven.begin()
    driven.scheduler.abort("b")
    failed = driven.scheduler.fail_step()
    assert [(s.sequence_id, s.finish_reason) for s in failed] == [("a", FinishReason.ERROR)]
    assert driven.pool.ledger()[Column.HELD] == 0
    assert driven.pool.registered_hashes() == [], "the prefix cache has a block of a failed step"
    assert driven.step() == {"c": 7}


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


def test_a_prompt_that_fails_in_a_later_chunk_keeps_the_cached_blocks_of_its_earlier_chunks() -> None:
    driven = Driven(budget=8)
    driven.add("a", range(1, 17))
    driven.step()
    assert driven.end(driven.begin(), failed=["a"]) == []
    assert driven.pool.ledger()[Column.HELD] == 0
    assert len(driven.pool.registered_hashes()) == 2
    assert driven.scheduler.num_waiting_tokens == 0
    assert driven.scheduler.prompts_left() == []


def test_at_most_two_steps_are_in_flight_and_they_end_in_order() -> None:
    driven = Driven()
    driven.add("a", [1])
    plan = driven.begin()
    driven.begin()
    with pytest.raises(AssertionError, match="two steps"):
        driven.scheduler.schedule()
    with pytest.raises(AssertionError, match="another step"):
        driven.scheduler.complete_step(StepOutput(plan.step_id + 1, {"a": SampledToken(1)}))
    assert [event.sequence_id for event in driven.end(plan)] == ["a"]


def test_waiting_tokens_are_the_tokens_left_to_prefill() -> None:
    driven = Driven(budget=8)
    driven.add("a", range(1, 13))
    assert driven.scheduler.num_waiting_tokens == 12
    driven.step()
    assert driven.scheduler.num_waiting_tokens == 4
    driven.step()
    assert driven.scheduler.num_waiting_tokens == 0
