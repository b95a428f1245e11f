"""`decode_attention` against its reference."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.decode_attention import MAX_SPLITS, num_decode_splits
from tests.kernels.attention_cases import (
    LAYER,
    Context,
    Shape,
    assert_near,
    by_both,
    int32,
    random_context,
    random_heads,
)


def compare(shape: Shape, num_positions: list[int], num_splits: int, seed: int = 0, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(seed)
    context = random_context(shape, num_positions, generator)
    heads = random_heads(shape, len(num_positions) + 1, generator)
    rows = torch.randperm(len(heads), generator=generator, dtype=torch.int32)[: len(num_positions)]
    compare_rows(shape, context, heads, rows, int32(*num_positions), num_splits, device)


def compare_rows(
    shape: Shape,
    context: Context,
    heads: torch.Tensor,
    rows: torch.Tensor,
    num_positions: torch.Tensor,
    num_splits: int,
    device: str = "cpu",
) -> None:
    attended = torch.full((len(heads), shape.num_heads, shape.head_dim), 7.0, dtype=shape.dtype)
    partial = torch.full((len(rows), shape.num_heads, num_splits, shape.head_dim + 2), torch.nan)
    places = (context.block_ids, rows, context.first_block, num_positions)
    arguments = (heads, context.pool, LAYER, *places, partial, attended, context.scales)
    expected, found = by_both("decode_attention", device, arguments, attended)
    assert_near(found, expected)
    untouched = torch.ones(len(heads), dtype=torch.bool)
    untouched[rows.long()] = False
    assert (found[untouched] == 7.0).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_head_size_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    compare(Shape(4, 2, head_dim, dtype=dtype), [1, 270], num_splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "num_splits"), [(64, 2), (80, 1), (128, 2)])
def test_a_pool_with_scales(dtype: torch.dtype, head_dim: int, num_splits: int) -> None:
    shape = Shape(6, 2, head_dim, dtype=dtype, has_scales=True)
    compare(shape, [1, 270, 33], num_splits, seed=head_dim)


@pytest.mark.parametrize("group", [1, 3, 8, 17])
def test_every_group_of_query_heads(group: int) -> None:
    compare(Shape(2 * group, 2, 64), [65, 17], num_splits=1, seed=group)


@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_splits_of_short_and_long_contexts(num_splits: int) -> None:
    compare(Shape(3, 1, 64), [1, 64, 129, 700], num_splits, seed=num_splits)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    compare(Shape(4, 2, 64, block_size, torch.bfloat16), [33, 260], num_splits=2, seed=block_size)


def test_a_pool_of_more_elements_than_an_int32_counts() -> None:
    shape = Shape(2, 1, 64, dtype=torch.float16)
    generator = torch.Generator().manual_seed(5)
    small = random_context(shape, [40], generator)
    strides = (1 << 30, *small.pool.stride()[1:])
    memory = torch.empty((len(small.pool) - 1) * strides[0] + small.pool[0].numel(), dtype=shape.dtype)  # not touched
    pool = memory.as_strided(small.pool.shape, strides)
    pool.copy_(small.pool)
    context = Context(pool, small.block_ids, small.first_block)
    assert pool[-1].data_ptr() - pool.data_ptr() > 2 << 31
    compare_rows(shape, context, random_heads(shape, 1, generator), int32(0), int32(40), num_splits=1)


def test_rows_that_only_fill_a_graph_change_no_other_row() -> None:
    shape, generator = Shape(2, 1, 64), torch.Generator().manual_seed(6)
    context = random_context(shape, [90, 1], generator)
    padding = int(context.first_block[1])
    context = Context(context.pool, context.block_ids, int32(int(context.first_block[0]), padding, padding))
    compare_rows(shape, context, random_heads(shape, 3, generator), int32(0, 1, 2), int32(90, 1, 1), num_splits=4)


def test_large_scores_do_not_overflow() -> None:
    shape, generator = Shape(2, 1, 64), torch.Generator().manual_seed(7)
    context = random_context(shape, [200], generator)
    heads = random_heads(shape, 1, generator) * 100
    compare_rows(shape, context, heads, int32(0), int32(200), num_splits=2)


def test_sizes_beyond_half_precision_in_a_pool_with_scales() -> None:
    shape, generator = Shape(4, 2, 64, dtype=torch.bfloat16, has_scales=True), torch.Generator().manual_seed(8)
    context = random_context(shape, [200], generator)
    assert context.scales is not None
    heads = random_heads(shape, 1, generator) * 2.0**18
    keys, values = context.scales[:, LAYER].unbind(1)
    keys *= 2.0**-18
    values[context.block_ids[1:7].long()] *= 2.0**-30
    compare_rows(shape, context, heads, int32(0), int32(200), num_splits=1)


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "max_context", "expected"),
    [
        (1, 8, 2048, 16),
        (1, 8, 131072, MAX_SPLITS),
        (32, 8, 8192, 5),
        (128, 8, 8192, 2),
        (512, 8, 8192, 1),
        (1, 1, 16, 1),
    ],
)
def test_splits_fill_the_device_and_no_more(batch: int, num_kv_heads: int, max_context: int, expected: int) -> None:
    assert num_decode_splits(batch, num_kv_heads, max_context, num_processors=132) == expected
