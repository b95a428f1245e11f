"""Masks of grammars on a device: the host packs eight tokens into a byte, the device unpacks them over the logits.

A mask depends on the token before it, so it exists only when the step before has been collected. The forward pass of a
step needs no mask and is launched ahead as ever; its sampling waits for the mask (`engine/gpu/runner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from core.output_grammar import Masks
from engine.gpu.device_queue import upload
from engine.gpu.sampling_plan import MaskedRow

_ROWS_AT_ONCE = 32  # bounds the memory: 10 bytes for each row and token of the vocabulary


class Unmasked(NamedTuple):
    """The logits that masks have replaced, of rows with log-probabilities."""

    rows: torch.Tensor  # int64 [R]
    logits: torch.Tensor  # float32 [R, vocab]

    def restore(self, logits: torch.Tensor) -> None:
        logits.index_copy_(0, self.rows, self.logits)


def mask_logits(logits: torch.Tensor, grammar_rows: Sequence[MaskedRow], masks: Masks) -> Unmasked | None:
    """Launch on the current stream: -inf for every token that a mask does not allow. A row without a mask has failed.

    # logits: float32 [S, vocab], changed in place
    """
    masked = [row for row in grammar_rows if row.chunk.sequence.sequence_id in masks.allowed]
    asked = [row.row for row in masked if row.chunk.sequence.sampling.num_logprobs is not None]
    unmasked = None
    if asked:
        rows = upload(np.array(asked, np.int64), logits.device)
        unmasked = Unmasked(rows, logits.index_select(0, rows))
    for first in range(0, len(masked), _ROWS_AT_ONCE):
        _mask(logits, masked[first : first + _ROWS_AT_ONCE], masks)
    return unmasked


def _mask(logits: torch.Tensor, masked: Sequence[MaskedRow], masks: Masks) -> None:
    packed = np.stack([_allowed(row, masks.allowed[row.chunk.sequence.sequence_id][0]) for row in masked])
    rows = upload(np.array([row.row for row in masked], np.int64), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (upload(packed, logits.device)[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


def _allowed(row: MaskedRow, mask: bytes) -> np.ndarray:
    """Without the barred tokens, unless the grammar allows no others. # uint8 [vocab / 8, rounded up]"""
    allowed = np.frombuffer(mask, np.uint8)
    if not row.barred:
        return allowed
    barred = np.array(row.barred)
    later = allowed.copy()
    np.bitwise_and.at(later, barred >> 3, ~(1 << (barred & 7)).astype(np.uint8))
    return later if later.any() else allowed
