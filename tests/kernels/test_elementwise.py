"""The elementwise kernels beside the references."""

from __future__ import annotations

import pytest
import torch
import xxhash

from engine.fp8 import CODES, dequantized
from engine.gpu import digests, elementwise, fp8_kernels, reference

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("updated", [True, False])
@pytest.mark.parametrize("size", [96, 576, 1024])
def test_add_rms_norm_is_the_reference(dtype: torch.dtype, updated: bool, size: int) -> None:
    update = random(3, size, dtype=dtype, seed=2) if updated else None
    weight = random(size, dtype=dtype, seed=3)
    found, expected = random(3, size, dtype=dtype), random(3, size, dtype=dtype)
    normed, expected_normed = torch.full_like(found, torch.nan), torch.empty_like(found)

    elementwise.add_rms_norm(found, update, weight, 1e-5, normed)
    reference.add_rms_norm(expected, update, weight, 1e-5, expected_normed)

    # The interpreter cuts a float32 off where a device rounds it to bfloat16.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=0)
    torch.testing.assert_close(normed, expected_normed, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_add_rms_norm_takes_rows_of_a_wider_tensor() -> None:
    wide, normed = random(3, 256, dtype=torch.float32), torch.full((3, 200), torch.nan)
    before, hidden, expected = wide.clone(), wide[:, 16:96], torch.empty(3, 80)
    weight, update = random(80, dtype=torch.float32, seed=3), random(3, 80, dtype=torch.float32, seed=2)
    expected_hidden = hidden.clone()

    elementwise.add_rms_norm(hidden, update, weight, 1e-6, normed[:, :80])
    reference.add_rms_norm(expected_hidden, update, weight, 1e-6, expected)

    torch.testing.assert_close(normed[:, :80], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(hidden, expected_hidden)
    assert normed[:, 80:].isnan().all()
    assert torch.equal(wide[:, :16], before[:, :16])
    assert torch.equal(wide[:, 96:], before[:, 96:])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [96, 1536])
def test_silu_and_multiply_is_the_reference(dtype: torch.dtype, size: int) -> None:
    gate_up = random(5, 2 * size, dtype=dtype) * 8
    found, expected = torch.full((5, size), torch.nan, dtype=dtype), torch.empty(5, size, dtype=dtype)

    elementwise.silu_and_multiply(gate_up, found)
    reference.silu_and_multiply(gate_up, expected)

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_silu_of_large_values_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    activated = torch.empty(1, 4)
    elementwise.silu_and_multiply(gate_up, activated)
    assert activated.tolist() == [[0.0, 0.0, 200.0, 1e4]]


def test_no_rows_launch_nothing() -> None:
    empty = torch.empty(0, 64)
    elementwise.add_rms_norm(empty, empty, torch.ones(64), 1e-5, empty)
    elementwise.silu_and_multiply(torch.empty(0, 128), empty)


# ---- The kernels around a product of codes, beside their references.

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 48), (5, 300), (2, 20_000)])
def test_codes_and_scales_are_those_of_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = (torch.randn(num_rows, size, generator=generator) * 3).to(dtype)
    rows[0, :7] = torch.tensor([0.0, 1e-3, -1e-3, 2**-9, 400, -400, 0.07])
    found, wanted = (torch.zeros(num_rows, size, dtype=CODES) for _ in range(2))
    found_scales, scales = torch.zeros(num_rows), torch.zeros(num_rows)
    fp8_kernels.quantize_rows(rows, found, found_scales)
    reference.quantize_rows(rows, wanted, scales)
    torch.testing.assert_close(found_scales, scales, rtol=1e-6, atol=0)
    # The factor of a row may differ in its last bit, and so a value between two codes may get the other one.
    assert (found.float() != wanted.float()).float().mean() < 1e-3
    exact = rows.float()
    error = (dequantized(found, found_scales, torch.float32) - exact).abs()
    assert (error <= exact.abs() * 2**-4 * 1.001 + scales[:, None] * 2**-9).all()


def test_a_row_of_zeros_has_codes_of_zero() -> None:
    codes, scales = torch.ones(2, 32).to(CODES), torch.zeros(2)
    fp8_kernels.quantize_rows(torch.zeros(2, 32), codes, scales)
    assert not codes.float().any()
    assert (scales > 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_rows", "has_bias"), [(1, 40, False), (3, 1500, True)])
def test_products_are_scaled(num_tokens: int, num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    products = torch.randn(num_tokens, num_rows, generator=generator) * 1000
    token_scales, row_scales = (torch.rand(count, generator=generator) for count in (num_tokens, num_rows))
    bias = torch.randn(num_rows, generator=generator).to(dtype) if has_bias else None
    found, wanted = (torch.full((num_tokens, num_rows), float("nan"), dtype=dtype) for _ in range(2))
    fp8_kernels.scale_products(products, token_scales, row_scales, bias, found)
    reference.scale_products(products, token_scales, row_scales, bias, wanted)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---- The digest kernel gives what xxhash gives for the same bytes.


def digests_of(memory: torch.Tensor, blocks: list[int]) -> list[int]:
    found = torch.full((len(blocks),), -1)
    sums = torch.full(digests.scratch_shape(len(blocks), memory.shape[1]), -1)
    digests.block_digests(memory, torch.tensor(blocks, dtype=torch.int32), sums, found)
    return [digest % 2**64 for digest in found.tolist()]


def random_bytes(num_blocks: int, num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, num_bytes), dtype=torch.uint8)


BLOCKS = [
    # The shortest block; the last chunk of 8, of 1,024 and of 64 bytes; several loops of the chain and of the sums
    *((random_bytes(3, num_bytes), [2, 0]) for num_bytes in (248, 1032, 2048, 16 * 1024 + 64, 34 * 1024 + 512)),
    (random_bytes(4, 256), [3, 1, 1, 0, 2, 3]),  # several programs
    *((torch.full((1, 1088), value, dtype=torch.uint8), [0]) for value in (0, 255)),
    (random_bytes(3, 512)[:, :320], [1]),  # of a wider row
]


@pytest.mark.parametrize(("memory", "blocks"), BLOCKS)
def test_digests_are_those_of_xxhash(memory: torch.Tensor, blocks: list[int]) -> None:
    assert digests_of(memory, blocks) == [xxhash.xxh3_64_intdigest(memory[block].numpy().tobytes()) for block in blocks]
