"""A step that is planned while another is in flight counts on promised tokens, and preempts nobody."""

from __future__ import annotations

from core.scheduling.block_pool import Column
from core.step import StepPlan
from tests.unit.core.driving_scheduler import Driven


def chunks(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(sequence, start, tokens, promised) of each chunk."""
    return [(c.sequence.sequence_id, c.start, c.num_tokens, c.promised) for c in plan.chunks]


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
