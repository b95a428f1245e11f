"""The stages of a request and the states of a hand-off: each table leads to an end, and no step leaves an end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

import pytest

from core.handoff import OWNER_STEPS, PULLER_STEPS, OwnerState, PullerState
from core.lifecycle import NEXT_STAGES, Stage, StageError, Timeline

State = TypeVar("State", bound=Enum)


def reachable(table: Mapping[State, frozenset[State]], start: State) -> set[State]:
    found, fresh = {start}, {start}
    while fresh:
        fresh = {after for state in fresh for after in table[state]} - found
        found |= fresh
    return found


OWNER_ENDS = {OwnerState.RELEASED, OwnerState.EXPIRED, OwnerState.ABORTED}
PULLER_ENDS = {PullerState.COMPLETE, PullerState.FAILED, PullerState.CANCELLED}


@pytest.mark.parametrize(
    ("table", "states", "start", "ends"),
    [
        (NEXT_STAGES, Stage, Stage.TOKENIZE, {Stage.FINISHED}),
        (OWNER_STEPS, OwnerState, OwnerState.COMPUTING, OWNER_ENDS),
        (PULLER_STEPS, PullerState, PullerState.RESERVED, PULLER_ENDS),
    ],
    ids=["stages", "owner", "puller"],
)
def test_every_state_of_a_table_is_reachable_and_leads_to_an_end_which_no_step_leaves(
    table: Mapping[State, frozenset[State]], states: type[State], start: State, ends: set[State]
) -> None:
    assert set(table) == set(states) == reachable(table, start)
    assert {state for state in states if not table[state]} == ends
    assert all(reachable(table, state) & ends for state in states)


def test_a_timeline_takes_only_the_steps_of_the_table() -> None:
    for before, after in itertools.product(Stage, Stage):
        timeline = Timeline(before, entered_at=1.0)
        if after in NEXT_STAGES[before]:
            timeline.enter(after, 2.0)
            assert (timeline.stage, timeline.entered_at) == (after, 2.0)
        else:
            with pytest.raises(StageError, match=f"{before.name} -> {after.name}"):
                timeline.enter(after, 2.0)
            assert (timeline.stage, timeline.history) == (before, [])


def test_the_stages_of_a_timeline_add_up_to_its_length() -> None:
    steps = [(Stage.QUEUE, 1.5), (Stage.PREFILL, 2.25), (Stage.QUEUE, 4.0), (Stage.PREFILL, 4.5)]
    timeline = Timeline(Stage.TOKENIZE, entered_at=1.0)
    for stage, now in [*steps, (Stage.DECODE, 5.0), (Stage.FINISHED, 8.0)]:
        timeline.enter(stage, now)
    assert timeline.seconds_in(Stage.TOKENIZE) == 0.5
    assert timeline.seconds_in(Stage.QUEUE) == 0.75 + 0.5
    assert timeline.seconds_in(Stage.PREFILL) == 1.75 + 0.5
    assert timeline.seconds_in(Stage.TRANSFER) == 0.0
    assert sum(timeline.seconds_in(stage) for stage in Stage) == 8.0 - 1.0
    ends = [end for _, _, end in timeline.history]
    assert [start for _, start, _ in timeline.history] == [1.0, *ends[:-1]], "no gap and no overlap"
