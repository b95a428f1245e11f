"""The stages of a request and the states of a hand-off: each table leads to an end, and no step leaves an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

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


@dataclass(frozen=True)
class Table(Generic[State]):
    steps: Mapping[State, frozenset[State]]
    states: Iterable[State]
    start: State
    ends: frozenset[State]


TABLES: dict[str, Table[Any]] = {
    "stages": Table(NEXT_STAGES, Stage, Stage.TOKENIZE, frozenset({Stage.FINISHED})),
    "owner": Table(
        OWNER_STEPS,
        OwnerState,
        OwnerState.COMPUTING,
        frozenset({OwnerState.RELEASED, OwnerState.EXPIRED, OwnerState.ABORTED}),
    ),
    "puller": Table(
        PULLER_STEPS,
        PullerState,
        PullerState.RESERVED,
        frozenset({PullerState.COMPLETE, PullerState.FAILED, PullerState.CANCELLED}),
    ),
}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@each_table
def test_every_state_is_in_the_table_and_reachable(table: Table[Any]) -> None:
    assert set(table.steps) == set(table.states) == reachable(table.steps, table.start)


@each_table
def test_no_step_leaves_an_end_and_every_state_leads_to_an_end(table: Table[Any]) -> None:
    assert {state for state in table.states if not table.steps[state]} == table.ends
    assert all(reachable(table.steps, state) & table.ends for state in table.states)


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
