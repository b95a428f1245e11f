"""`rope_and_cache` against its reference, and the three attention operators one after another."""

from __future__ import annotations

import pytest
import torch

from engine.gpu import reference
from engine.gpu.ops import ops
from engine.rotary import RotaryTable
from tests.kernels.attention_cases import (
    LAYER,
    NUM_LAYERS,
    Shape,
    int32,
    poisoned_pool,
    poisoned_pool_with_scales,
    random_heads,
)


def compare(shape: Shape, positions: list[int], slots: list[int], device: str = "cpu") -> None:
    heads = random_heads(shape, len(positions), torch.Generator().manual_seed(0))
    table = RotaryTable(torch.rand(shape.head_dim // 2), 100)
    results = []
    for rope_and_cache, where in ((reference.rope_and_cache, "cpu"), (ops.rope_and_cache, device)):
        rotated, pool = heads.clone().to(where), poisoned_pool(shape, 6).to(where)
        tables = table.cosine.to(where), table.sine.to(where)
        rope_and_cache(rotated, *tables, int32(*positions).to(where), int32(*slots).to(where), pool, LAYER)
        results.append((rotated.cpu(), pool.cpu()))
    (expected_heads, expected_pool), (found_heads, found_pool) = results
    tolerance = 2e-6 if shape.dtype == torch.float32 else 0.04  # one rounding of bfloat16 at 4 to 8
    torch.testing.assert_close(
        found_heads[:, : shape.num_heads], expected_heads[:, : shape.num_heads], rtol=0, atol=tolerance
    )
    torch.testing.assert_close(found_pool, expected_pool, rtol=0, atol=tolerance, equal_nan=True)
    values, blocks, places = found_heads[:, -shape.num_kv_heads :], [], []
    blocks, places = [s // shape.block_size for s in slots], [s % shape.block_size for s in slots]
    assert torch.equal(found_pool[blocks, LAYER, 1, :, places], values)
    num_written = len(slots) * shape.num_kv_heads * shape.head_dim * 2
    assert (~found_pool.isnan()).sum() == num_written
    assert found_pool[:, [layer for layer in range(NUM_LAYERS) if layer != LAYER]].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_head_size_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    compare(Shape(4, 2, head_dim, dtype=dtype), [0, 3, 99], [95, 17, 0])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 8), (32, 8), (5, 1)])
def test_every_number_of_heads(num_heads: int, num_kv_heads: int) -> None:
    compare(Shape(num_heads, num_kv_heads, 64), [7, 8], [33, 34])


@pytest.mark.parametrize("block_size", [16, 32])
def test_block_sizes(block_size: int) -> None:
    slots = [0, block_size - 1, block_size, 5 * block_size + 3]
    compare(Shape(3, 1, 64, block_size, torch.bfloat16), [1, 2, 3, 4], slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_pool_with_scales(dtype: torch.dtype, head_dim: int) -> None:
    shape = Shape(9, 3, head_dim, dtype=dtype)
    heads = random_heads(shape, 3, torch.Generator().manual_seed(0))
    heads[1, -1] = 0.0
    heads[2, -2] *= 1000.0
    table = RotaryTable(torch.rand(head_dim // 2), 100)
    results = []
    for rope_and_cache in (reference.rope_and_cache, ops.rope_and_cache):
        pool, scales = poisoned_pool_with_scales(shape, 6)
        rope_and_cache(heads.clone(), table.cosine, table.sine, int32(0, 3, 99), int32(95, 17, 0), pool, LAYER, scales)
        results.append((pool.float(), scales))
    (expected_codes, expected), (found_codes, found) = results
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0, equal_nan=True)
    # A key may be rotated to a neighbour in its dtype, and a value near the middle between two codes rounds to either.
    torch.testing.assert_close(found_codes, expected_codes, rtol=0.13, atol=2.0**-9, equal_nan=True)
    written = ~expected_codes.isnan()
    assert (found_codes != expected_codes)[written].sum() < 0.05 * written.sum()
    assert written.sum() == 3 * 3 * 2 * head_dim
    assert (~found.isnan()).sum() == 3 * 3 * 2


def test_the_bfloat16_dot_of_the_interpreter_is_still_wrong() -> None:
    """The kernels convert to float32 before a product in the interpreter. If this test fails, they need not."""
    import triton
    import triton.language as tl

    @triton.jit
    def multiply(left, right, product):
        place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(product + place, tl.dot(tl.load(left + place), tl.load(right + place)))

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 16, generator=generator, dtype=torch.float32).bfloat16() for _ in range(2))
    product = torch.empty(16, 16)
    multiply[1,](left, right, product)
    assert (product - left.float() @ right.float()).abs().max() > 1e6
