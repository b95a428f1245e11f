"""The inputs of a step as arrays of int32, made by the host from the chunks of the step.

    T tokens    S rows that sample    Cd rows that attend alone    Cp chunks of several tokens

A chunk of one token is a row that attends alone, and so is each of its drafts: all rows write their keys and values
before one of them attends, and each sees the positions up to its own. Each chunk has a run of blocks in the block ids
of its kind, one run behind the other. A graph computes a fixed number of rows, so padding follows the real ones: rows
of one token each, in the padding block behind the pool's last block, and prompts without a token. Only the last field
of a graph has any length, so there the runs of prompts follow those of the rows that attend alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from core.step import ScheduledChunk
from engine.batch import Batch, known_token_ids
from engine.block_tables import BlockTables, StepTables
from engine.gpu.ops import PREFILL_TILE_TOKENS

NOT_PROMISED = -1
NO_TILE = -1

Array = TypeVar("Array", bound=Sized)


class StepFields(NamedTuple, Generic[Array]):
    """The operators' contracts in `engine/gpu/ops.py` explain the fields. All are int32."""

    token_ids: Array  # [T] 0 for promised tokens
    sources: Array  # [T] the row of a promised token among the rows of the step before, else NOT_PROMISED
    positions: Array  # [T]
    slots: Array  # [T]
    sampling_rows: Array  # [S]; empty for a graph without prompts, which computes the logits of all rows
    decode_row: Array  # [Cd]
    decode_block: Array  # [Cd]
    decode_positions: Array  # [Cd]
    prefill_row: Array  # [Cp]
    prefill_block: Array  # [Cp]
    prefill_start: Array  # [Cp]
    prefill_tokens: Array  # [Cp]
    tile_chunk: Array  # [tiles]
    tile_first: Array  # [tiles]
    prefill_block_ids: Array  # [blocks of the chunks of several tokens]
    decode_block_ids: Array  # [of the others]; the last field, because the others have fixed places in a graph

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self))


StepArrays = StepFields[np.ndarray]


class GraphSize(NamedTuple):
    """The shape of a graph. A step that fits is padded to this shape."""

    rows: int
    alone: int  # rows that attend alone
    prompts: int = 0  # chunks of several tokens; 0: every row attends alone and has logits
    sampled: int = 0  # rows with logits, in a graph with prompts

    @property
    def tiles(self) -> int:
        return self.rows // PREFILL_TILE_TOKENS + self.prompts if self.prompts else 0

    def holds(self, arrays: StepArrays) -> bool:
        """Padding that attends needs a row of its own."""
        num_rows, num_alone, num_prompts = map(len, (arrays.token_ids, arrays.decode_row, arrays.prefill_row))
        if not self.prompts or not num_prompts:
            return self.prompts == num_prompts == 0 and num_rows <= self.rows
        fits = num_rows < self.rows or (num_rows == self.rows and num_alone == self.alone)
        fits = fits and len(arrays.sampling_rows) <= self.sampled
        return fits and num_alone <= self.alone and num_prompts <= self.prompts


_EMPTY = np.zeros(0, np.int32)


class StepArranger:
    """Arranges the steps of one runner in the order of their submission. Calls must not overlap."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks  # of the pool; the padding block has this number
        self.block_size = block_size
        self._tables = BlockTables(num_blocks, block_size)

    def arrange(self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int]) -> StepArrays:
        """`rows_before` has the row of each sequence that the step before samples."""
        batch = Batch.of(chunks)
        return self._arrange(chunks, batch, self._tables.begin_step(batch), rows_before)

    def arrange_apart(self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int]) -> StepArrays:
        """Like `arrange`, for some chunks of an arranged step. Any thread may call this at any time."""
        batch = Batch.of(chunks)
        tables = BlockTables(self.num_blocks, self.block_size).begin_step(batch)
        return self._arrange(chunks, batch, tables, rows_before)

    def padded(self, arrays: StepArrays, size: GraphSize) -> StepArrays:
        """The step with padding up to `size`, in which it fits, for a graph."""
        num_tokens = len(arrays.token_ids)
        block_ids = np.concatenate((arrays.decode_block_ids, arrays.prefill_block_ids))
        padding_rows = np.arange(num_tokens, num_tokens + size.alone - len(arrays.decode_row), dtype=np.int32)

        def pad(array: np.ndarray, length: int, value: int) -> np.ndarray:
            return np.concatenate((array, np.full(length - len(array), value, np.int32)))

        return arrays._replace(
            token_ids=pad(arrays.token_ids, size.rows, 0),
            sources=pad(arrays.sources, size.rows, NOT_PROMISED),
            positions=pad(arrays.positions, size.rows, 0),
            slots=pad(arrays.slots, size.rows, self.num_blocks * self.block_size),
            sampling_rows=pad(arrays.sampling_rows, size.sampled, 0) if size.prompts else _EMPTY,
            decode_row=np.concatenate((arrays.decode_row, np.minimum(padding_rows, size.rows - 1))),
            decode_block=pad(arrays.decode_block, size.alone, len(block_ids)),
            decode_positions=pad(arrays.decode_positions, size.alone, 1),
            prefill_row=pad(arrays.prefill_row, size.prompts, 0),
            prefill_block=pad(arrays.prefill_block + np.int32(len(arrays.decode_block_ids)), size.prompts, 0),
            prefill_start=pad(arrays.prefill_start, size.prompts, 0),
            prefill_tokens=pad(arrays.prefill_tokens, size.prompts, 0),
            tile_chunk=pad(arrays.tile_chunk, size.tiles, NO_TILE),
            tile_first=pad(arrays.tile_first, size.tiles, 0),
            prefill_block_ids=_EMPTY,
            decode_block_ids=np.append(block_ids, np.int32(self.num_blocks)),
        )

    def only_padding(self, size: GraphSize) -> StepArrays:
        return self.padded(StepArrays(*[_EMPTY] * len(StepArrays._fields)), size)

    def _arrange(
        self,
        chunks: Sequence[ScheduledChunk],
        batch: Batch,
        tables: StepTables,
        rows_before: Mapping[str, int],
    ) -> StepArrays:
        sources = np.full(len(batch.positions), NOT_PROMISED, np.int32)
        sources[batch.promised_rows] = [rows_before[chunk.sequence.sequence_id] for chunk in chunks if chunk.promised]
        blocks = tables.block_of_each_token(batch, self.block_size)
        is_alone = np.array([chunk.num_tokens == 1 for chunk in chunks])
        alone, prefills = np.flatnonzero(is_alone[batch.chunk_of_token]), np.flatnonzero(~is_alone)
        decode_block, decode_block_ids = _runs(tables, np.flatnonzero(is_alone))
        prefill_block, prefill_block_ids = _runs(tables, prefills)
        tile_chunk, tile_first = tiles(batch.num_tokens[prefills])
        return StepArrays(
            token_ids=np.array(known_token_ids(chunks), np.int32),
            sources=sources,
            positions=batch.positions,
            slots=(blocks * self.block_size + batch.positions % self.block_size).astype(np.int32),
            sampling_rows=batch.sampling_rows,
            decode_row=alone.astype(np.int32),
            decode_block=decode_block[(np.cumsum(is_alone) - 1)[batch.chunk_of_token[alone]]],
            decode_positions=batch.positions[alone] + 1,
            prefill_row=batch.first_row[prefills],
            prefill_block=prefill_block,
            prefill_start=batch.start[prefills],
            prefill_tokens=batch.num_tokens[prefills],
            tile_chunk=tile_chunk,
            tile_first=tile_first,
            prefill_block_ids=prefill_block_ids,
            decode_block_ids=decode_block_ids,
        )


def _runs(tables: StepTables, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first place of each chunk's run, and the blocks of all runs. # int32 [chunks], int32 [blocks]"""
    rows, counts = tables.rows[chunks], tables.num_blocks[chunks]
    runs = [tables.table[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
    return np.cumsum(counts, dtype=np.int32) - counts, np.concatenate((_EMPTY, *runs))


def tiles(num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of chunks of `num_tokens`: the chunk and the first token of each. # int32 [tiles] twice

    The last tiles of the chunks come first: they attend to most positions, and so take longest.
    """
    counts = -(-num_tokens // PREFILL_TILE_TOKENS)
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * PREFILL_TILE_TOKENS
    order = np.argsort(-first, kind="stable")
    return chunk[order], first[order].astype(np.int32)
