"""One step's attention and a model's other operations, by the operators of `engine/gpu/ops.py`.

T tokens of the step    Hq query heads    Hkv KV heads    D head size
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.gpu.ops import ops
from engine.gpu.step_buffers import StepTensors
from engine.rotary import RotaryTable

# (chunks of one token, KV heads, positions of the longest context) -> programs that share a context
NumSplits = Callable[[int, int, int], int]


def fixed_splits(count: int) -> NumSplits:
    """The references use no scratch, so one split suffices for them."""
    return lambda batch, num_kv_heads, max_context: count  # noqa: ARG005


class OperatorOps:
    """The `Ops` of a model on a device."""

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        if len(hidden):  # a step without a row that samples has no row behind the last layer
            ops.add_rms_norm(hidden, update, weight, epsilon, normed)
        return normed

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        activated = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        if len(gate_up):
            ops.silu_and_multiply(gate_up, activated)
        return activated


class OperatorAttention:
    """The `StepAttention` of a step. `max_context` bounds the contexts of its chunks of one token."""

    def __init__(
        self,
        pool: torch.Tensor,  # [num_blocks, num_layers, 2, Hkv, block_size, D]
        rotary_table: RotaryTable,
        step: StepTensors,
        max_context: int,
        num_splits: NumSplits,
        scales: torch.Tensor | None = None,  # of the pool: float32 [num_blocks, num_layers, 2, Hkv, block_size]
    ) -> None:
        self._pool = pool
        self._scales = scales
        self._table = rotary_table
        self._step = step
        self._num_decodes = len(step.decode_row)
        self._num_splits = num_splits(self._num_decodes, pool.shape[3], max_context) if self._num_decodes else 0
        self._attended: torch.Tensor | None = None  # [T, Hq, D]
        self._partial: torch.Tensor | None = None  # float32 [Cd, Hq, splits, D + 2]

    def attend(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        step, pool, scales = self._step, self._pool, self._scales
        attended, partial = self._memory(heads)
        ops.rope_and_cache(heads, self._table.cosine, self._table.sine, step.positions, step.slots, pool, layer, scales)
        if self._num_decodes:
            ops.decode_attention(
                heads, pool, layer, step.decode_block_ids, step.decode_row, step.decode_block,
                step.decode_positions, partial, attended, scales,
            )  # fmt: skip
        if len(step.prefill_row):
            # In a graph, the blocks of prompts follow those of decodes (engine/gpu/step_arrays.py).
            block_ids = step.prefill_block_ids if len(step.prefill_block_ids) else step.decode_block_ids
            ops.prefill_attention(
                heads, pool, layer, block_ids, step.prefill_row, step.prefill_block,
                step.prefill_start, step.prefill_tokens, step.tile_chunk, step.tile_first, attended, scales,
            )  # fmt: skip
        return attended

    def _memory(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and the scratch of all layers."""
        if self._attended is None or self._partial is None:
            num_tokens, num_all, head_dim = heads.shape
            num_heads = num_all - 2 * self._pool.shape[3]
            self._attended = heads.new_empty((num_tokens, num_heads, head_dim))
            shape = (self._num_decodes, num_heads, self._num_splits, head_dim + 2)
            self._partial = heads.new_empty(shape, dtype=torch.float32)
        return self._attended, self._partial
