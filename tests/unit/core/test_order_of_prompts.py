"""Which prompts the steps of a scheduler compute first."""

from __future__ import annotations

from unittest.mock import patch

from core.cost.step_cost import StepCost
from core.scheduling.prompt_order import _Share
from tests.unit.core.driving_scheduler import BLOCK_SIZE, Driven


def works(driven: Driven) -> list[float]:
    """Seconds left of each prompt, in order of arrival."""
    order = driven.scheduler.queues.prompts._order
    return [prompt.left for prompt in order._prompts.values()]


def test_a_prompt_that_falls_due_is_passed_no_more() -> None:
    driven = Driven(num_blocks=64, budget=8, max_waiting=64)
    long = driven.add("long", range(1, 41), max_tokens=1)
    passed = []
    for number in range(20):
        driven.add(f"short {number}", range(100 * number + 101, 100 * number + 109), arrival=number, max_tokens=1)
        passed.append("long" not in driven.step())
        if long.finish_reason is not None:
            break
    assert passed == [True] * 5 + [False] * 5, "the prompt of 40 tokens may take twice as long as alone"


def test_the_reported_work_has_no_cached_prefix_and_all_that_is_not_computed() -> None:
    driven = Driven(num_blocks=64, budget=8, max_running=1)
    driven.add("before", range(1, 41), max_tokens=1)
    driven.run_until_idle()
    driven.add("running", range(101, 121), max_tokens=1)
    driven.add("cached", [*range(1, 41), *range(50, 80)], arrival=1, max_tokens=1)
    plan = driven.begin()
    assert driven.scheduler.prompts_left() == [(20, 0), (30, 40)]
    driven.end(plan)
    driven.add("whole", range(1, 41), arrival=2, max_tokens=1)  # the last token is computed in any case
    driven.add("longer", range(1, 42), arrival=3, max_tokens=1)
    assert driven.scheduler.prompts_left() == [(12, 8), (30, 40), (BLOCK_SIZE, 40 - BLOCK_SIZE), (1, 40)]


def test_a_prompt_does_not_pass_if_the_blocks_are_too_few_for_the_rest_of_both() -> None:
    driven = Driven(num_blocks=6, budget=8)
    driven.add("long", range(1, 21), max_tokens=1)
    driven.step()
    driven.add("short", range(101, 109), arrival=1, max_tokens=1)
    assert driven.step() == {"long": 8}, "it needs 3 more blocks, `short` 2 and a next token 1, of 4"
    assert driven.step() == {"long": 4}
    assert [event.sequence_id for event in driven.run_until_idle()] == ["short"]
    assert driven.scheduler.num_preemptions == 0


def test_a_running_prompt_goes_on_while_the_first_one_has_no_place() -> None:
    driven = Driven(num_blocks=64, budget=8, max_running=1)
    driven.add("long", range(1, 25), max_tokens=1)
    driven.step()
    driven.add("short", [101, 102], arrival=1, max_tokens=1)
    assert [driven.step() for _ in range(3)] == [{"long": 8}, {"long": 8}, {"short": 2}]


def test_a_prompt_behind_a_pull_that_waits_for_blocks_is_not_admitted_though_it_is_the_shortest() -> None:
    driven = Driven(num_blocks=64, budget=8)
    driven.add("before", range(1, 17), arrival=1)
    driven.add("behind", [101, 102], arrival=3)
    plan = driven.scheduler.schedule(admit_before=(0, 0.0, 2))
    assert plan is not None
    assert [chunk.sequence.sequence_id for chunk in plan.chunks] == ["before"]
    driven.end(plan)
    assert driven.step() == {"behind": 2, "before": 6}


def test_a_pulled_sequence_takes_a_free_place_unless_a_prompt_of_higher_rank_has_a_claim_to_it() -> None:
    driven = Driven(num_blocks=64, budget=8, max_running=2)
    driven.add("running", range(1, 41), max_tokens=1)
    driven.step()
    driven.add("prompt", range(201, 280), arrival=1, max_tokens=1)
    driven.add_pulled("pulled", range(101, 105), arrival=2)
    assert driven.step() == {"running": 8}, "`prompt` waits longer, and will get the place"
    driven.scheduler.abort("prompt")
    assert driven.step() == {"pulled": 1, "running": 7}


def test_new_prices_change_the_work_of_prompts_that_wait() -> None:
    driven = Driven(num_blocks=64, budget=8)
    driven.add("a", range(1, 41), max_tokens=1)
    driven.scheduler.step_cost = StepCost(0.0, 0.0, 0.0, token_s=2.0, pair_s=0.0)
    driven.step()
    assert works(driven) == [64.0]
    driven.scheduler.step_cost = StepCost(0.0, 0.0, 0.0, token_s=2.1, pair_s=0.0)
    driven.step()
    assert works(driven) == [48.0], "a change of 5 % is left alone"


def test_the_order_looks_at_all_prompts_after_a_change_and_not_in_each_step() -> None:
    driven = Driven(num_blocks=64, budget=8, max_running=2, max_waiting=1024)
    for number in range(1000):
        driven.add(f"p{number}", range(1, BLOCK_SIZE * 20), arrival=number, max_tokens=1)
    with patch.object(_Share, "_choose", autospec=True, side_effect=_Share._choose) as looks:
        steps = [driven.step() for _ in range(9)]
    assert steps == [{"p0": 8}] * 9
    looks.assert_not_called()
