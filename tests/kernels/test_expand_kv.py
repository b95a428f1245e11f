"""`expand_kv` against its reference, and prompts over a pool of 8 bits in parts of its KV heads."""

from __future__ import annotations

import pytest
import torch

from engine.gpu import reference, step_attention
from engine.gpu.step_attention import ExpandedPrompts
from tests.kernels.attention_cases import LAYER, Shape, assert_near, by_both, int32, random_context, random_heads
from tests.kernels.test_prefill_attention import tiles_of


def compare(shape: Shape, num_positions: list[int], first_head: int, num_heads: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(shape.head_dim)
    context = random_context(shape, num_positions, generator)
    block_ids = context.block_ids[1:]
    expanded = torch.full((len(block_ids), 1, 2, num_heads, shape.block_size, shape.head_dim), 7.0, dtype=shape.dtype)
    arguments = (context.pool, context.scales, LAYER, block_ids, first_head, expanded)
    expected, found = by_both("expand_kv", device, arguments, expanded)
    # The interpreter cuts off what a conversion to bfloat16 should round.
    rtol = torch.finfo(shape.dtype).eps
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (128, 128)])
def test_some_heads_of_blocks(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    compare(Shape(6, 3, head_dim, block_size, dtype, has_scales=True), [33, 5], 1, 2)


@pytest.mark.parametrize("heads_at_a_time", [1, 2, 4])
def test_prompts_over_a_pool_of_8_bits(monkeypatch: pytest.MonkeyPatch, heads_at_a_time: int) -> None:
    shape = Shape(8, 4, 64, dtype=torch.bfloat16, has_scales=True)
    generator = torch.Generator().manual_seed(heads_at_a_time)
    context = random_context(shape, [150, 35], generator)
    heads = random_heads(shape, 55, generator)
    blocks, scales = context.block_ids[1:], context.scales
    assert scales is not None
    head_bytes = len(blocks) * 2 * shape.block_size * shape.head_dim * 2
    monkeypatch.setattr(step_attention, "EXPANDED_BYTES", heads_at_a_time * head_bytes + 5)
    rows, starts, counts = int32(0, 20), int32(130, 0), int32(20, 35)
    found, expected = (torch.full((55, shape.num_heads, shape.head_dim), 7.0, dtype=shape.dtype) for _ in range(2))
    chunks = (rows, context.first_block - 1, starts, counts, *tiles_of([20, 35]))
    ExpandedPrompts(context.pool, scales, blocks, heads).attend(heads, LAYER, chunks, found)
    for row, first, start, count in zip(*(each.tolist() for each in chunks[:4]), strict=True):
        reference._attend(heads, context.pool, LAYER, blocks[first:], row, start, count, expected, scales)
    assert_near(found, expected)
