"""One step's attention and a model's other operations, by the operators of `engine/gpu/ops.py`.

T tokens of the step    Hq query heads    Hkv KV heads    D head size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


EXPANDED_BYTES = 128 << 20
"""Prompts of 32,768 positions of an 8B model in one pass. A step of more takes fewer KV heads at a time."""


class ExpandedPrompts:
    """Attention of prompts over a pool of 8 bits: their blocks of one layer, in the dtype of the heads.

    The memory serves all layers of a step. It has EXPANDED_BYTES whatever the step needs, so a measured step counts it
    (engine/gpu/pool_size.py); only a step in which one KV head needs more has more.
    """

    def __init__(self, pool: torch.Tensor, scales: torch.Tensor, block_ids: torch.Tensor, heads: torch.Tensor) -> None:
        _, _, kinds, num_kv_heads, block_size, head_dim = pool.shape
        self._pool, self._scales, self._block_ids = pool, scales, block_ids
        self._group = heads.shape[1] // num_kv_heads - 2
        head_elements = len(block_ids) * kinds * block_size * head_dim
        fitting = max(1, EXPANDED_BYTES // (head_elements * heads.element_size()))
        count = next(n for n in range(min(fitting, num_kv_heads), 0, -1) if num_kv_heads % n == 0)
        memory = heads.new_empty(max(EXPANDED_BYTES // heads.element_size(), count * head_elements))
        shape = (len(block_ids), 1, kinds, count, block_size, head_dim)
        self._expanded = memory[: count * head_elements].view(shape)
        self._places = torch.arange(len(block_ids), dtype=torch.int32, device=heads.device)

    def attend(self, heads: torch.Tensor, layer: int, chunks: Sequence[torch.Tensor], attended: torch.Tensor) -> None:
        """`chunks`: the arguments of `prefill_attention` from first_row to tile_first."""
        group, count = self._group, self._expanded.shape[3]
        for first in range(0, self._pool.shape[3], count):
            ops.expand_kv(self._pool, self._scales, layer, self._block_ids, first, self._expanded)
            queries = slice(first * group, (first + count) * group)
            # The operator takes the heads of `count` keys and values behind the queries, and does not read them.
            some = heads[:, queries.start : queries.stop + 2 * count]
            ops.prefill_attention(some, self._expanded, 0, self._places, *chunks, attended[:, queries])


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
        self._expanded: ExpandedPrompts | None = None

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
            chunks = (
                step.prefill_row, step.prefill_block, step.prefill_start, step.prefill_tokens, step.tile_chunk,
                step.tile_first,
            )  # fmt: skip
            if scales is None:
                # In a graph, the blocks of prompts follow those of decodes (engine/gpu/step_arrays.py).
                block_ids = step.prefill_block_ids if len(step.prefill_block_ids) else step.decode_block_ids
                ops.prefill_attention(heads, pool, layer, block_ids, *chunks, attended)
            else:
                self._expanded = self._expanded or ExpandedPrompts(pool, scales, step.prefill_block_ids, heads)
                self._expanded.attend(heads, layer, chunks, attended)
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
