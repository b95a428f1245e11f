"""The operators of a step's tokens on a GPU beside their references on the CPU, in pools poisoned with NaN.

tests/kernels compares every operator under Triton's interpreter; here are the shapes of real models, and long contexts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.gpu.ops import FEW_ROWS
from tests.kernels import (
    test_decode_attention,
    test_expand_kv,
    test_few_rows,
    test_prefill_attention,
    test_rope_and_cache,
)
from tests.kernels.attention_cases import Shape

pytestmark = pytest.mark.gpu

MODELS = [(32, 8, 128, 16), (9, 3, 64, 16), (16, 2, 128, 32), (4, 4, 80, 16), (10, 2, 96, 64), (4, 2, 256, 16)]
SHAPES = [Shape(*sizes, dtype=dtype) for sizes in MODELS for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_the_cache_of_real_shapes(shape: Shape) -> None:
    test_decode_attention.compare(shape, [1, 15, 16, 17, 101, 1024, 4096, 2501], num_splits=4, device="cuda")
    prefills = [(0, 700), (0, 2), (37, 64), (16, 65), (1000, 130), (2047, 3)]  # (start, tokens)
    test_prefill_attention.compare(shape, prefills, device="cuda")
    test_rope_and_cache.compare(shape, [0, 3, 99], [95, 17, 0], device="cuda")


WITH_SCALES = [replace(shape, has_scales=True) for shape in SHAPES]


@pytest.mark.parametrize("shape", WITH_SCALES, ids=str)
def test_attention_over_pools_of_8_bits(shape: Shape) -> None:
    test_decode_attention.compare(shape, [1, 15, 16, 17, 101, 1024, 4096, 2501], num_splits=4, device="cuda")
    test_expand_kv.compare(shape, [700, 2, 1133], 1, shape.num_kv_heads - 1, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [(64, 32), (96, 32), (448, 32), (64, 112), (9, 5)], ids=str)
def test_products_of_few_rows_of_real_shapes(tiles: tuple[int, int], dtype: torch.dtype) -> None:
    for num_tokens in (1, 5, FEW_ROWS):
        test_few_rows.compare(num_tokens, tiles, num_programs=min(264, tiles[0] * tiles[1]), dtype=dtype, device="cuda")
