"""Products with packed matrices agree with plain products, and a row's result does not depend on other rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.config import EngineConfig
from engine.backend import choose_linear_method
from engine.cpu.build import build
from engine.cpu.kernels import Kernels
from engine.cpu.linear import NativeLinear, PackedLinear
from engine.cpu.quantized_linear import NativeQuantizedLinear
from engine.linear import PlainLinear
from engine.quantized_linear import DequantizedLinear
from model_files.catalogue import default_cache_dir
from tests.support.c_kernels import need_compiler, need_kernels, portable_tiles
from tests.unit.engine.cpu.kernel_cases import TOLERANCE, linear_differences


@pytest.fixture(scope="module", params=["this CPU's", "portable tiles"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    need_compiler()
    if request.param == "portable tiles":
        return Kernels(build(portable_tiles(), default_cache_dir()))
    loaded = need_kernels()
    if loaded.bf16_linear is None:
        pytest.skip("this CPU lacks AVX-512")
    return loaded


def test_any_shape_agrees_with_torch_by_several_threads(kernels: Kernels) -> None:
    """`test_kernels.py` has one thread."""
    found = [difference for seed in range(60) for difference in linear_differences(kernels, seed, num_threads=3)]
    assert len(found) == 180
    assert [difference for difference in found if not difference[1] <= TOLERANCE["bfloat16"]] == []


def test_a_row_gets_the_same_bits_alone_and_in_a_batch(kernels: Kernels) -> None:
    multiply = NativeLinear(kernels, 1).prepare(torch.randn(200, 576).bfloat16(), torch.randn(200).bfloat16())
    inputs = torch.randn(515, 576).bfloat16()
    together = multiply(inputs)
    for first, last in [(0, 1), (3, 8), (20, 40), (470, 515), (0, 515)]:
        assert torch.equal(multiply(inputs[first:last]), together[first:last])
    assert torch.equal(NativeLinear(kernels, 1).prepare(torch.eye(576).bfloat16(), None)(inputs), inputs)


def test_many_matrices_do_not_share_memory(kernels: Kernels) -> None:
    method = NativeLinear(kernels, 1)
    weights = [torch.randn(out, 512).bfloat16() for out in (1, 33, 20_000, 70, 20_000, 5)]
    products = [method.prepare(weight, None) for weight in weights]
    inputs = torch.randn(2, 512).bfloat16()
    for multiply, weight in zip(products, weights, strict=True):
        assert isinstance(multiply, PackedLinear)
        torch.testing.assert_close(multiply(inputs).float(), inputs.float() @ weight.float().T, atol=0.3, rtol=0.02)


def test_an_embedding_and_a_tied_head_share_the_same_panels(kernels: Kernels) -> None:
    method, table, other = NativeLinear(kernels, 1), torch.randn(70, 64).bfloat16(), torch.randn(70, 64).bfloat16()
    embed, head, untied = method.prepare_embedding(table), method.prepare_head(table), method.prepare_head(other)
    row_ids, inputs = torch.tensor([0, 31, 32, 69, 5, 5]), torch.eye(64).bfloat16()
    assert torch.equal(embed(row_ids), table[row_ids])
    assert embed(row_ids).is_contiguous()
    assert torch.equal(head(inputs), table.T.float())
    assert torch.equal(untied(inputs), other.T.float())
    assert isinstance(head, PackedLinear)
    assert isinstance(untied, PackedLinear)
    next_to_come = method.prepare(other, None)
    assert isinstance(next_to_come, PackedLinear)
    size = next_to_come.weight_address - untied.weight_address
    assert untied.weight_address - head.weight_address == size, "nothing was packed between the table and the other"


@pytest.mark.parametrize(("dtype", "in_size"), [(torch.float32, 64), (torch.bfloat16, 63)])
def test_matrices_that_the_kernel_does_not_support_use_torch(
    kernels: Kernels, dtype: torch.dtype, in_size: int
) -> None:
    weight, inputs = torch.randn(40, in_size).to(dtype), torch.randn(3, in_size).to(dtype)
    native, plain = NativeLinear(kernels, 1), PlainLinear()
    assert torch.equal(native.prepare(weight, None)(inputs), F.linear(inputs, weight))
    assert torch.equal(native.prepare_head(weight)(inputs), F.linear(inputs, weight).float())
    gated, expected = native.prepare_gated(weight)(inputs), plain.prepare_gated(weight)(inputs)
    torch.testing.assert_close(gated, expected, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=2e-2)


def test_the_method_follows_the_kernels_and_the_quantization() -> None:
    loaded, tiles = need_kernels(), Kernels(build(portable_tiles(), default_cache_dir()))
    plain, int8 = EngineConfig(), EngineConfig(quantization="int8")
    found = [type(choose_linear_method(plain, kernels, 1)) for kernels in (loaded, tiles, None)]
    assert found == [PlainLinear if loaded.bf16_linear is None else NativeLinear, NativeLinear, PlainLinear]
    assert type(choose_linear_method(int8, loaded, 1)) is NativeQuantizedLinear
    assert type(choose_linear_method(int8, None, 1)) is DequantizedLinear
