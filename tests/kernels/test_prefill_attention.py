"""`prefill_attention` against its reference: chunks of several tokens, with and without a cached prefix."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.ops import PREFILL_TILE_TOKENS
from tests.kernels.attention_cases import LAYER, Shape, assert_near, by_both, int32, random_context, random_heads


def tiles_of(num_tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles of the chunks, and two that are none, as in a buffer of a fixed size."""
    tiles = [(c, first) for c, n in enumerate(num_tokens) for first in range(0, n, PREFILL_TILE_TOKENS)]
    tile_chunk, tile_first = zip(*tiles, (-1, 0), (-1, 7), strict=True)
    return int32(*tile_chunk), int32(*tile_first)


def compare(shape: Shape, chunks: list[tuple[int, int]], seed: int = 0, device: str = "cpu") -> None:
    """Each chunk is its start and its number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    start, num_tokens = [c[0] for c in chunks], [c[1] for c in chunks]
    context = random_context(shape, [s + n for s, n in chunks], generator)
    # A row before each chunk belongs to a chunk of one token, which this operator does not write.
    first_row = [1 + sum(num_tokens[:c]) + c for c in range(len(chunks))]
    heads = random_heads(shape, first_row[-1] + num_tokens[-1] + 1, generator)
    places = (int32(*first_row), context.first_block, int32(*start), int32(*num_tokens), *tiles_of(num_tokens))
    attended = torch.full((len(heads), shape.num_heads, shape.head_dim), 7.0, dtype=shape.dtype)
    arguments = (heads, context.pool, LAYER, context.block_ids, *places, attended)
    expected, found = by_both("prefill_attention", device, arguments, attended)
    assert_near(found, expected)
    assert (found[[row - 1 for row in first_row]] == 7.0).all()
    assert (found[-1] == 7.0).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_head_size_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    compare(Shape(2, 1, head_dim, dtype=dtype), [(37, 20)])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_every_group_of_query_heads(group: int) -> None:
    compare(Shape(2 * group, 2, 64, dtype=torch.bfloat16), [(5, 20)], seed=group)


@pytest.mark.parametrize("start", [0, 1, 63, 64, 127])
def test_a_cached_prefix_of_any_length(start: int) -> None:
    compare(Shape(1, 1, 64), [(start, 66)], seed=start)


def test_several_chunks_of_different_sequences() -> None:
    compare(Shape(2, 1, 64, dtype=torch.float16), [(0, 2), (100, 64), (0, 130), (31, 33)])


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    compare(Shape(2, 1, 64, block_size, torch.bfloat16), [(40, 70), (0, 17)], seed=block_size)
