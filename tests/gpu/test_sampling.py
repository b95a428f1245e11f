"""Sampling and fp8 products on a CUDA device. benchmarks/gpu.py measures them."""

from __future__ import annotations

import pytest
import torch

from engine.fp8 import Fp8Matrix
from engine.gpu import reference
from engine.gpu.linear import Fp8Linear
from tests.unit.engine.gpu.sampling_cases import by_numpy, differing, on_device, some_case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _need_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize(("seed", "vocab"), [(0, 259), (1, 5000), (2, 128_256)])
def test_a_device_samples_numpy_s_tokens(seed: int, vocab: int) -> None:
    case = some_case(seed, num_rows=32, vocab=vocab)
    found, logits = on_device(case, torch.device("cuda"))
    assert differing(case, found, by_numpy(case)) == []
    assert (logits == case.logits).all(), "the logits are as before"


@pytest.mark.parametrize("num_tokens", [1, 20, 50, 300])
def test_products_with_fp8_weights_are_those_of_the_reference(num_tokens: int) -> None:
    matrix = Fp8Matrix(576, 1536, torch.bfloat16, torch.device("cuda"))
    matrix.put(0, torch.randn(576, 1536))
    inputs = torch.randn(num_tokens, 1536, device="cuda").bfloat16()
    expected = torch.empty(num_tokens, 576, device="cuda")
    reference.fp8_linear(inputs, matrix.codes, matrix.scales, None, expected)
    torch.testing.assert_close(Fp8Linear(matrix, None)(inputs).float(), expected, rtol=2e-2, atol=0.5)
