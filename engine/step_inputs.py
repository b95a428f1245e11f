"""The inputs of a step for `Model.compute`, made from the step's chunks.

    T tokens of the step    S rows that sample

`prepare` makes everything that needs no token of the step before. It may run on another thread while the step before is
computed. `PreparedStep.inputs` adds the promised tokens, which the step before has sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.step import ScheduledChunk
from engine.attention import AttentionBackend, StepAttention
from engine.batch import Batch, known_token_ids
from engine.model import ModelInputs
from engine.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class PreparedStep:
    token_ids: np.ndarray  # int64 [T]; 0 for the promised tokens
    promised_rows: np.ndarray  # int32: the rows of the promised tokens, in order
    sampling_rows: torch.Tensor | None  # int64 [S]; None: all rows
    attention: StepAttention
    device: torch.device

    def inputs(self, promised: Sequence[int] = ()) -> ModelInputs:
        """`promised` has the promised tokens, in order."""
        self.token_ids[self.promised_rows] = promised
        return ModelInputs(torch.from_numpy(self.token_ids).to(self.device), self.sampling_rows, self.attention)


class InputPreparer:
    """Prepares steps for an attention backend, which holds the pool."""

    def __init__(self, attention: AttentionBackend, rotary_table: RotaryTable, device: torch.device) -> None:
        self.attention = attention
        self.rotary_table = rotary_table
        self.device = device

    def prepare(self, chunks: Sequence[ScheduledChunk]) -> PreparedStep:
        batch = Batch.of(chunks)
        token_ids = np.array(known_token_ids(chunks), np.int64)
        return PreparedStep(
            token_ids=token_ids,
            promised_rows=batch.promised_rows,
            sampling_rows=self._rows(batch.sampling_rows) if len(batch.sampling_rows) < len(token_ids) else None,
            attention=self.attention.begin_step(batch, self.rotary_table.rows(batch.positions)),
            device=self.device,
        )

    def _rows(self, rows: np.ndarray) -> torch.Tensor:
        """# int64"""
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)
