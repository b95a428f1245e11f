"""The products of plain matrices on a device: those of torch, for every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.gpu.linear import DeviceLinear
from engine.gpu.ops import FEW_ROWS, FEW_ROWS_COLUMNS, FEW_ROWS_TILE
from engine.gpu.step_attention import OperatorOps

METHOD = DeviceLinear(OperatorOps())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [FEW_ROWS_TILE, FEW_ROWS_TILE + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_few_and_of_many_rows(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_rows, FEW_ROWS_COLUMNS, generator=generator).to(dtype)
    bias = torch.randn(num_rows, generator=generator).to(dtype) if has_bias else None
    multiply, head = METHOD.prepare(weight, bias), METHOD.prepare_head(weight)
    for num_tokens in (0, 1, FEW_ROWS, FEW_ROWS + 1):
        inputs = torch.randn(num_tokens, FEW_ROWS_COLUMNS, generator=generator).to(dtype)
        torch.testing.assert_close(multiply(inputs), F.linear(inputs, weight, bias))
        logits = head(inputs)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits, F.linear(inputs, weight).float(), rtol=2**-7, atol=0.05)
