"""Sampling and fp8 products on a CUDA device. benchmarks/gpu.py measures them."""

from __future__ import annotations

import pytest
import torch

from engine.fp8 import Fp8Matrix, dequantized, quantized
from engine.gpu.linear import DeviceLinear
from engine.gpu.step_attention import OperatorOps
from tests.unit.engine.gpu.sampling_cases import by_numpy, differing, on_device, some_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("seed", "vocab"), [(0, 259), (1, 5000), (2, 128_256)])
def test_a_device_samples_numpy_s_tokens(seed: int, vocab: int) -> None:
    case = some_case(seed, num_rows=32, vocab=vocab)
    found, logits = on_device(case, torch.device("cuda"))
    assert differing(case, found, by_numpy(case)) == []
    assert (logits == case.logits).all(), "the logits are as before"


def test_tokens_of_one_logit_are_drawn_in_the_order_of_their_ids() -> None:
    """Logits rounded to bfloat16 have many equals, also at the border of top_k, where torch.topk takes any."""
    case = some_case(3, num_rows=32, vocab=128_256)
    case.logits[:] = torch.from_numpy(case.logits).bfloat16().float().numpy()
    found, _ = on_device(case, torch.device("cuda"))
    assert differing(case, found, by_numpy(case)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 20, 300, 600])
def test_products_with_fp8_weights_are_those_of_dequantized_codes(num_tokens: int, dtype: torch.dtype) -> None:
    inputs, bias = torch.randn(num_tokens, 1536).to(dtype), torch.randn(576).to(dtype)
    matrix = Fp8Matrix(576, 1536, torch.float32, torch.device("cuda"))
    matrix.put(0, torch.randn(576, 1536))
    codes, scales = quantized(inputs)
    expected = dequantized(codes, scales, torch.float32) @ matrix.dequantized().cpu().T + bias.float()
    found = DeviceLinear(OperatorOps()).prepare(matrix, bias.cuda())(inputs.cuda()).cpu()
    # A value between two codes may get the other one on the GPU, where the factor of a row is rounded differently.
    assert (found.float() - expected).norm() < 0.005 * expected.norm()
