"""A step with sequences that wait for their next token takes as many prompt tokens as its time limit allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.cost.step_cost import StepCost, StepWork, work_of
from core.scheduling.step_budget import LIMIT_SHARE, MIN_PROMPT_TOKENS, StepBudget
from tests.unit.core.driving_scheduler import Driven

# 20 ms, 1 ms for each decode and prompt token: a step of 100 ms has room for 70 ms, and a decode leaves 69 tokens of it
COST = StepCost(step_s=0.020, sequence_s=0.001, context_s=0.0, token_s=0.001, pair_s=0.0)
LIMIT_MS = 90.5 / LIMIT_SHARE


def limited(cost: StepCost = COST, limit_ms: float = LIMIT_MS, max_running: int = 8) -> Driven:
    driven = Driven(num_blocks=512, budget=256, max_running=max_running, slo_itl_ms=limit_ms)
    driven.scheduler.step_cost = cost
    return driven


def decoding(**options: object) -> Driven:
    """One sequence is in decode."""
    driven = limited(**options)  # type: ignore[arg-type]
    driven.add("stream", [1, 2], max_tokens=100)
    driven.step()
    return driven


def test_a_step_without_decodes_takes_the_whole_token_budget() -> None:
    driven = limited()
    driven.add("long", range(1, 601))
    driven.add("next", range(1001, 1651), arrival=1)
    assert [driven.step() for _ in range(3)] == [{"long": 256}, {"long": 256}, {"long": 88, "next": 168}]


def test_the_prompts_of_a_step_share_the_limit_in_their_order() -> None:
    driven = decoding()
    driven.add("second", range(1, 101), arrival=2)
    driven.add("first", range(201, 251), arrival=1)
    driven.add("third", range(401, 501), arrival=3)
    assert driven.step() == {"stream": 1, "first": 50, "second": 19}


def test_a_limit_that_the_decodes_exceed_leaves_a_few_tokens_to_the_first_prompt() -> None:
    driven = decoding(limit_ms=5.0)
    driven.add("long", range(1, 601), arrival=1)
    driven.add("next", range(1001, 1701), arrival=2)
    for _ in range(3):
        assert driven.step() == {"stream": 1, "long": MIN_PROMPT_TOKENS}


def test_a_pulled_sequence_counts_as_a_decode_of_the_step_that_admits_it() -> None:
    driven = limited(replace(COST, context_s=0.001))
    driven.add("long", range(1, 601), arrival=1)
    assert driven.step() == {"long": 256}
    driven.add_pulled("pulled", [21, 22, 23], arrival=2)
    assert driven.step() == {"long": 65, "pulled": 1}, "it attends to 4 tokens"


def test_the_last_token_of_a_prompt_is_no_decode_that_a_client_waits_for() -> None:
    driven = limited()
    driven.add("short", range(1, 258), arrival=1)
    driven.add("long", range(1001, 1601), arrival=2)
    assert driven.step() == {"short": 256}
    assert driven.step() == {"short": 1, "long": 255}


@pytest.mark.parametrize("seconds", [0.05, 0.0105, -1.0])
def test_a_budget_never_grants_more_than_its_tokens_or_its_seconds(seconds: float) -> None:
    budget = StepBudget(40, 3, COST, seconds)
    assert budget.has_prompt_room
    granted = 0
    while budget.has_prompt_room:
        num_tokens = budget.prompt_tokens(7, granted)
        assert 0 < num_tokens <= 7
        budget.take_prompt(num_tokens, granted)
        granted += num_tokens
    assert budget.prompt_tokens(7, granted) == 0
    assert granted == min(37, max(int(seconds * 1000), MIN_PROMPT_TOKENS))


def test_work_counts_decodes_context_prompt_tokens_and_pairs() -> None:
    driven = decoding()
    driven.add("long", range(1, 601), arrival=1)
    driven.step()
    assert work_of(driven.begin().chunks) == StepWork(1, 4, 69, 69 * (69 + 34.5))
