"""The kernels around a product of codes, beside their references."""

from __future__ import annotations

import pytest
import torch

from engine.fp8 import CODES, dequantized
from engine.gpu import fp8_kernels, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
