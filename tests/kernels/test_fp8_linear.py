"""The product with fp8 weights against its reference."""

from __future__ import annotations

import pytest
import torch

from engine.fp8 import Fp8Matrix
from engine.gpu import fp8_kernels, reference

# The interpreter cuts float32 to bfloat16 off instead of rounding.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "size", "num_rows", "has_bias"), [(1, 100, 40, False), (20, 300, 33, True), (70, 64, 130, True)]
)
def test_products_are_those_of_the_dequantized_weights(
    num_tokens: int, size: int, num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    matrix = Fp8Matrix(num_rows, size, dtype, torch.device("cpu"))
    matrix.put(0, torch.randn(num_rows, size, generator=generator) * size**-0.5)
    inputs = torch.randn(num_tokens, size, generator=generator).to(dtype)
    bias = torch.randn(num_rows, generator=generator).to(dtype) if has_bias else None
    found, wanted = torch.empty(num_tokens, num_rows, dtype=dtype), torch.empty(num_tokens, num_rows, dtype=dtype)
    fp8_kernels.fp8_linear(inputs, matrix.codes, matrix.scales, bias, found)
    reference.fp8_linear(inputs, matrix.codes, matrix.scales, bias, wanted)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_every_code_is_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(torch.float8_e4m3fn).view(16, 16)
    found = torch.empty(16, 16)
    fp8_kernels.fp8_linear(torch.eye(16), codes, torch.ones(16), None, found)
    assert torch.equal(found.T, codes.float())
