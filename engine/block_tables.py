"""The block tables of a step's sequences, as one array that stays from step to step.

    table  [rows, columns]   one row for each sequence; column n holds the block of positions from n * block_size on

The block table of a `SequenceView` only grows. A step therefore writes only the new blocks of its sequences, and
changes no element that the running step before it reads. A sequence that is absent from a step gives its row back. The
row is free one step later: by then, every step that read the row has been collected. A larger array replaces a full
array, and the running step keeps the old array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.step import SequenceView
from engine.batch import Batch

_FIRST_SIZE = 8  # rows and columns


@dataclass(frozen=True, slots=True)
class StepTables:
    """The block tables of one step's C chunks. Columns behind the blocks of a sequence repeat its first block."""

    table: np.ndarray  # int32 [rows, columns]
    rows: np.ndarray  # int64 [C]
    num_blocks: np.ndarray  # int32 [C] the blocks that hold the sequence after the step

    def block_of_each_token(self, batch: Batch, block_size: int) -> np.ndarray:
        """# int64 [T]"""
        blocks = self.table[self.rows[batch.chunk_of_token], batch.positions // block_size]
        return blocks.astype(np.int64)


class BlockTables:
    """At most two steps are begun and not collected."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks  # of the pool
        self.block_size = block_size
        self._table = np.zeros((_FIRST_SIZE, _FIRST_SIZE), np.int32)
        self._num_known = np.zeros(_FIRST_SIZE, np.int32)  # blocks that each row holds
        self._views: tuple[SequenceView, ...] = ()  # of the newest step
        self._rows = np.zeros(0, np.int64)  # of `_views`
        self._row_of: dict[SequenceView, int] = {}
        self._free = list(range(_FIRST_SIZE))
        self._leaving: list[int] = []  # rows that only the step before the newest may read

    def begin_step(self, batch: Batch) -> StepTables:
        num_blocks = batch.num_blocks(self.block_size)
        if (widest := int(num_blocks.max())) > self._table.shape[1]:
            self._enlarge(len(self._table), 2 * widest)
        if batch.views != self._views:
            self._assign_rows(batch.views)
        known = self._num_known[self._rows]
        for chunk in np.flatnonzero((num_blocks > known + 1) | (known == 0)).tolist():
            self._fill(int(self._rows[chunk]), batch.views[chunk], int(num_blocks[chunk]))
        if len(grown := np.flatnonzero((num_blocks == known + 1) & (known > 0))):
            self._append(grown, batch.views, num_blocks[grown])
        return StepTables(self._table, self._rows, num_blocks)

    def _assign_rows(self, views: tuple[SequenceView, ...]) -> None:
        row_of = {view: self._row_of.pop(view) for view in set(views) & self._row_of.keys()}
        self._free += self._leaving
        self._leaving = list(self._row_of.values())
        for view in views:
            if view not in row_of:
                row_of[view] = self._new_row()
        self._views, self._row_of = views, row_of
        self._rows = np.array([row_of[view] for view in views], np.int64)

    def _new_row(self) -> int:
        if not self._free:
            num_rows, num_columns = self._table.shape
            self._enlarge(2 * num_rows, num_columns)
            self._free = list(range(num_rows, 2 * num_rows))
        row = self._free.pop()
        self._num_known[row] = 0
        return row

    def _fill(self, row: int, view: SequenceView, num_blocks: int) -> None:
        known = int(self._num_known[row])
        blocks = self._checked(view.block_table[known:num_blocks])
        assert len(blocks) == num_blocks - known, "a table is shorter than its sequence"
        if known == 0:
            self._table[row] = blocks[0]
        self._table[row, known:num_blocks] = blocks
        self._num_known[row] = num_blocks

    def _append(self, chunks: np.ndarray, views: tuple[SequenceView, ...], num_blocks: np.ndarray) -> None:
        """One block for each of these chunks: a decode needs a new block every `block_size` steps."""
        added = zip(chunks.tolist(), (num_blocks - 1).tolist(), strict=True)
        rows = self._rows[chunks]
        self._table[rows, num_blocks - 1] = self._checked([views[chunk].block_table[last] for chunk, last in added])
        self._num_known[rows] = num_blocks

    def _checked(self, blocks: object) -> np.ndarray:
        """# int32 [blocks]"""
        checked = np.array(blocks, np.int32)
        assert checked.min(initial=0) >= 0, "attention would read outside the pool"
        assert checked.max(initial=0) < self.num_blocks, "attention would read outside the pool"
        return checked

    def _enlarge(self, num_rows: int, num_columns: int) -> None:
        table, num_known = self._table, self._num_known
        self._table = np.zeros((num_rows, num_columns), np.int32)
        self._table[: len(table)] = table[:, :1]
        self._table[: len(table), : table.shape[1]] = table
        self._num_known = np.zeros(num_rows, np.int32)
        self._num_known[: len(num_known)] = num_known
