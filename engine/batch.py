"""The chunks of a step as arrays.

    C chunks    T tokens of all chunks, in order: the rows of the step    S rows that sample

Made once per step, for the model and its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from core.step import ScheduledChunk, SequenceView


@dataclass(frozen=True, slots=True)
class Batch:
    views: tuple[SequenceView, ...]  # [C]
    start: np.ndarray  # int32 [C] the position of the chunk's first token
    num_tokens: np.ndarray  # int32 [C] with drafts
    first_row: np.ndarray  # int32 [C]
    chunk_of_token: np.ndarray  # [T]
    positions: np.ndarray  # int32 [T]
    sampling_rows: np.ndarray  # int32 [S] the last row of each chunk that samples, or its last token and its drafts
    promised_rows: np.ndarray  # int32 [promised chunks]

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> Batch:
        views, starts, counts, samples, promised, drafts = zip(*chunks, strict=True)
        num_drafts = np.array([len(guesses) for guesses in drafts], np.int32)
        start, num_tokens = np.array(starts, np.int32), np.array(counts, np.int32) + num_drafts
        first_row = np.cumsum(num_tokens, dtype=np.int32) - num_tokens
        chunk_of_token = np.repeat(np.arange(len(start)), num_tokens)
        positions = np.arange(len(chunk_of_token), dtype=np.int32) + (start - first_row)[chunk_of_token]
        sampling_rows = (first_row + num_tokens - 1)[np.array(samples, bool)]
        if num_drafts.any():
            places = [
                range(row - count, row + 1) for row, count in zip(sampling_rows, num_drafts[list(samples)], strict=True)
            ]
            sampling_rows = np.array(list(chain.from_iterable(places)), np.int32)
        promised_rows = first_row[np.array(promised, bool)]
        return cls(views, start, num_tokens, first_row, chunk_of_token, positions, sampling_rows, promised_rows)

    def num_blocks(self, block_size: int) -> np.ndarray:
        """The blocks that hold a chunk's sequence after this step. # int32 [C]"""
        return -(-(self.start + self.num_tokens) // block_size)


def known_token_ids(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """The tokens of the step; 0 for the promised tokens. # [T]"""
    token_ids: list[int] = []
    for view, start, num_tokens, _, promised, drafts in chunks:
        token_ids += (0,) if promised else view.token_ids[start : start + num_tokens]
        token_ids += drafts
    return token_ids
