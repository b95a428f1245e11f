"""BlockTables against lists: every step sees the block tables of its sequences, also while the next step begins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.batch import Batch
from engine.block_tables import BlockTables, StepTables
from engine.rotary import RotaryTable

BLOCK_SIZE = 4
NUM_BLOCKS = 1000
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def view_of(block_table: list[int]) -> SequenceView:
    return SequenceView("a", [], 0, block_table, GREEDY)


def batch_of(*parts: tuple[SequenceView, int, int]) -> Batch:
    """Chunks of (view, start, number of tokens)."""
    return Batch.of([ScheduledChunk(view, start, count, True, False) for view, start, count in parts])


def lists(tables: StepTables) -> list[list[int]]:
    return [tables.table[row, :count].tolist() for row, count in zip(tables.rows, tables.num_blocks, strict=True)]


def test_the_arrays_of_a_batch_follow_its_chunks() -> None:
    first, second, third = view_of([]), view_of([]), view_of([])
    batch = batch_of((first, 7, 1), (second, 2, 3), (third, 0, 2))
    assert batch.views == (first, second, third)
    assert batch.first_row.tolist() == [0, 1, 4]
    assert batch.chunk_of_token.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.positions.tolist() == [7, 2, 3, 4, 0, 1]
    assert batch.num_blocks(4).tolist() == [2, 2, 1]


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_each_step_sees_its_tables_until_the_next_step_but_one(seed: int) -> None:
    draw = random.Random(seed)
    tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE)
    live: list[tuple[SequenceView, int]] = []  # with the number of tokens
    before: tuple[StepTables, list[list[int]]] | None = None
    for _ in range(30):
        live = [part for part in live if draw.random() < 0.8]
        live += [(view_of([]), 0) for _ in range(draw.choice([0, 0, 1, 3, 12]) if live else 1)]
        draw.shuffle(live)
        live = [(view, length + draw.choice([1, 1, 1, 5, 40])) for view, length in live]
        for view, length in live:
            spare = draw.choice([0, 0, 2])
            added = -(-length // BLOCK_SIZE) + spare - len(view.block_table)
            view.block_table.extend(draw.sample(range(NUM_BLOCKS), max(added, 0)))  # type: ignore[attr-defined]
        expected = [list(view.block_table[: -(-length // BLOCK_SIZE)]) for view, length in live]
        step = tables.begin_step(batch_of(*((view, length - 1, 1) for view, length in live)))
        assert lists(step) == expected
        assert before is None or lists(before[0]) == before[1], "a step changed the tables of the running step"
        before = step, expected


def test_columns_behind_the_blocks_of_a_sequence_repeat_its_first_block() -> None:
    tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE)
    tables.begin_step(batch_of((view_of([9] * 40), 159, 1)))
    step = tables.begin_step(batch_of((view_of([3, 5]), 6, 1)))
    assert set(step.table[step.rows[0], 2:].tolist()) == {3}


def test_rows_of_ended_sequences_are_used_again() -> None:
    tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE)
    for number in range(200):
        step = tables.begin_step(batch_of(*((view_of([number, place]), 4, 1) for place in range(10))))
    assert len(step.table) <= 32
    assert len(tables._row_of) == 10, "the views of ended sequences are kept"


def test_a_block_outside_the_pool_is_an_assertion_error() -> None:
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(AssertionError, match="outside the pool"):
            BlockTables(NUM_BLOCKS, BLOCK_SIZE).begin_step(batch_of((view_of([1, block]), 5, 1)))
    tables, view = BlockTables(NUM_BLOCKS, BLOCK_SIZE), view_of([1])
    tables.begin_step(batch_of((view, 3, 1)))
    view.block_table.append(NUM_BLOCKS)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="outside the pool"):
        tables.begin_step(batch_of((view, 4, 1)))


def test_a_table_that_is_shorter_than_its_sequence_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="shorter than its sequence"):
        BlockTables(NUM_BLOCKS, BLOCK_SIZE).begin_step(batch_of((view_of([1]), 4, 1)))


def test_the_slot_of_each_token_is_in_its_block() -> None:
    batch = batch_of((view_of([7, 8, 9]), 7, 3), (view_of([2]), 0, 1))
    step = BlockTables(NUM_BLOCKS, BLOCK_SIZE).begin_step(batch)
    assert np.array_equal(step.block_of_each_token(batch, BLOCK_SIZE), [8, 9, 9, 2])


# ---- The angles of a step are those of each position alone.

FREQUENCIES = 10_000.0 ** -(torch.arange(64) / 64)


@pytest.mark.parametrize("positions", [[0], [7], [2999], [5, 0, 5], range(100, 400), range(3000)])
def test_a_table_has_the_bits_of_angles_that_are_computed_for_the_step(positions: list[int]) -> None:
    table = RotaryTable(FREQUENCIES, 3000)
    rotation = table.rows(np.array(positions, np.int32))
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * FREQUENCIES
    assert torch.equal(rotation.cosine, angles.cos())
    assert torch.equal(rotation.sine, angles.sin())


def test_a_position_behind_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        RotaryTable(FREQUENCIES, 8).rows(np.array([8], np.int32))
