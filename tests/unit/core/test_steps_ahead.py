"""A step that is planned while another is in flight counts on promised tokens, and preempts nobody."""

from __future__ import annotations

import pytest

from core.lifecycle import FinishReason
from core.scheduling.block_pool import Column
from core.step import StepPlan
from tests.unit.core.driving_scheduler import EOS, Driven


def chunks(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(sequence, start, tokens, promised) of each chunk."""
    return [(c.sequence.sequence_id, c.start, c.num_tokens, c.promised) for c in plan.chunks]


def test_a_sequence_in_decode_is_planned_ahead_on_the_token_that_the_step_in_flight_samples() -> None:
    driven = Driven()
    sequence = driven.add("a", [1, 2, 3])
    first, second = driven.begin(), driven.begin()
    assert chunks(first) == [("a", 0, 3, False)]
    assert chunks(second) == [("a", 3, 1, True)]
    assert [event.index for event in driven.end(first)] == [0]
    third = driven.begin()
    assert chunks(third) == [("a", 4, 1, True)]
    assert [event.index for event in driven.end(second)] == [1]
    assert sequence.token_ids == [1, 2, 3, 9, 9]


def test_the_chunks_of_a_prompt_follow_each_other_over_two_steps_in_flight() -> None:
    driven = Driven(budget=8)
    driven.add("a", range(1, 19))
    plans = [driven.begin(), driven.begin()]
    assert [chunks(plan) for plan in plans] == [[("a", 0, 8, False)], [("a", 8, 8, False)]]
    assert driven.pool.registered_hashes() == [], "the prefix cache has blocks that are not computed"
    driven.end(plans[0])
    assert len(driven.pool.registered_hashes()) == 2
    assert chunks(driven.begin()) == [("a", 16, 2, False)]
    assert driven.scheduler.num_waiting_tokens == 10


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"sample_limit": 1}])
def test_a_sequence_whose_promised_token_is_its_last_is_not_planned_ahead(options: dict[str, int]) -> None:
    driven = Driven()
    driven.add("ends", [1, 2], **options)
    plan = driven.begin()
    assert driven.scheduler.schedule() is None
    assert [event.finish_reason for event in driven.end(plan)] != [None]
    assert driven.scheduler.get("ends") is None


def test_a_stop_token_drops_the_token_of_the_step_ahead_and_leaks_no_block() -> None:
    driven = Driven()
    driven.add("stops", [1, 2, 3, 4])
    first, ahead = driven.begin(), driven.begin()
    driven.next_token = EOS
    assert [event.finish_reason for event in driven.end(first)] == [FinishReason.STOP]
    assert driven.pool.ledger()[Column.HELD] == 2, "the step ahead may still write to these blocks"
    assert driven.scheduler.schedule() is None, "a sequence that has ended is planned again"
    assert driven.end(ahead) == []
    assert driven.pool.ledger()[Column.HELD] == 0
    assert driven.scheduler.get("stops") is None


def test_a_step_that_needs_a_preemption_is_planned_after_the_step_in_flight() -> None:
    driven = Driven(num_blocks=3)
    driven.add("first", range(1, 5), max_tokens=4)
    driven.add("second", range(21, 25), arrival=1, max_tokens=4)
    plan = driven.begin()
    driven.pool.reserve(1)
    held = driven.pool.ledger()[Column.HELD]
    assert driven.scheduler.schedule() is None, "both need a second block"
    assert driven.pool.ledger()[Column.HELD] == held
    assert driven.scheduler.num_preemptions == 0
    driven.end(plan)
    assert driven.step() == {"first": 1}
    assert driven.scheduler.num_preemptions == 1


def test_a_pulled_sequence_preempts_a_later_one_only_after_the_step_in_flight() -> None:
    driven = Driven(num_blocks=7, max_running=2)
    driven.add("running", [1, 2], max_tokens=8)
    plan = driven.begin()
    driven.add_pulled("pulled", range(1, 13), arrival=1)  # lacks a block for its next token
    later = driven.add_pulled("later", range(21, 32), arrival=2)
    assert driven.scheduler.schedule() is None
    assert len(later.block_table) == 3
    driven.end(plan)
    assert driven.step() == {"running": 1, "pulled": 1}
    assert later.num_preemptions == 1


def test_a_failed_step_drops_the_step_ahead_and_only_its_own_sequences_end() -> None:
    driven = Driven(budget=8)
    driven.add("failed", range(1, 9), max_tokens=3)
    driven.begin()
    other = driven.add("other", range(21, 26), arrival=1)
    ahead = driven.begin()
    assert chunks(ahead) == [("failed", 8, 1, True), ("other", 0, 5, False)]
    assert [sequence.sequence_id for sequence in driven.scheduler.fail_step()] == ["failed"]
    driven.scheduler.check()
    assert other.num_planned_tokens == 0
    assert driven.step() == {"other": 5}
    assert {event.sequence_id for event in driven.run_until_idle()} == {"other"}
    assert driven.pool.ledger()[Column.HELD] == 0


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
