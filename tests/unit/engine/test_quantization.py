"""Quantization has a bounded error, and codes of a GGUF file are kept."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.gguf_groups import exact_groups
from engine.host_memory import HugePages
from engine.quantization import GROUP, QuantizedMatrix, quantize
from engine.weights import GGUFWeights
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.gguf_file import GGUFFile
from tests.unit.engine.cpu.kernel_cases import matrix_of

SHAPES = [(1, 1), (47, 31), (48, 32), (49, 33), (100, 576)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7.5)])
def test_no_error_is_larger_than_half_a_step(shape: tuple[int, int], bits: int, levels: float) -> None:
    """With 4 bits, the least-squares fit may leave larger errors at the ends of a group."""
    weight = normal(*shape)
    error = (quantize(weight, bits).dequantized() - weight).abs().max()
    assert error <= weight.abs().max() / levels * (0.51 if bits == 8 else 1.0)


def test_the_least_squares_fit_has_a_smaller_error_than_scaling_by_the_ends_of_a_group() -> None:
    weight = normal(200, 576)
    groups = weight.view(200, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    fitted = quantize(weight, 4).dequantized().view_as(groups)
    assert (fitted - groups).square().mean() < 0.97 * (plain - groups).square().mean()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-20, 60_000.0, 1e30])
def test_constant_groups_stay_finite_and_accurate_within_half_precision(bits: int, value: float) -> None:
    found = quantize(torch.full((2, 40), value), bits).dequantized()
    assert found.isfinite().all()
    if value < 60_000:
        torch.testing.assert_close(found, torch.full((2, 40), value), rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_returns_the_rows_that_were_put_into_it(bits: int, shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    matrix = matrix_of(weight, bits, torch.float32)
    assert torch.equal(matrix.dequantized(), quantize(weight, bits).dequantized())
    order = torch.randperm(shape[0])
    assert torch.equal(matrix.grouped(order).dequantized(), quantize(weight[order], bits).dequantized())


def test_a_matrix_takes_the_documented_number_of_bytes() -> None:
    assert QuantizedMatrix(960, 576, 8, torch.bfloat16, HugePages()).num_bytes * 8 == 8.5 * 960 * 576
    assert QuantizedMatrix(960, 576, 4, torch.bfloat16, HugePages()).num_bytes * 8 == 5 * 960 * 576


def write(path: Path, kind: gguf.GGMLQuantizationType, raw: np.ndarray) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def q4_k(rows: int, super_blocks: int) -> np.ndarray:
    """Random bytes with common scales of ordinary size: the gguf package reads this type but does not write it."""
    raw = np.random.default_rng(1).integers(0, 256, (rows, super_blocks, 144), dtype=np.uint8)
    raw[..., :4] = np.array([0.011, 0.013], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_groups_of_a_gguf_keep_their_codes_scales_and_minimums(tmp_path: Path, kind: str, bits: int) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(normal(50, 96).numpy(), quantization)
    file = write(tmp_path / "a.gguf", quantization, raw)
    rows = exact_groups(file, "token_embd.weight", bits)
    assert rows is not None
    assert torch.equal(rows.dequantized(), torch.from_numpy(file.tensor("token_embd.weight")))
    assert exact_groups(file, "token_embd.weight", 12 - bits) is None, "the other bits are not in the file"


def test_q4_k_keeps_its_codes_and_rounds_its_scales_to_half_precision(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q4_K, q4_k(10, 3))
    rows = exact_groups(file, "token_embd.weight", 4)
    assert rows is not None
    expected = torch.from_numpy(file.tensor("token_embd.weight"))
    torch.testing.assert_close(rows.dequantized(), expected, rtol=0, atol=2**-11 * 63 * (15 * 0.011 + 0.013))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7.5)])
def test_q6_k_is_quantized_again_one_matrix_at_a_time(tmp_path: Path, bits: int, levels: float) -> None:
    """A Q6_K scale covers 16 weights of 6 bits, so its groups are not ours. The error is at most half a step."""
    raw = np.random.default_rng(2).integers(0, 256, (10, 3, 210), dtype=np.uint8)
    raw[..., 208:] = np.array([0.0003], np.float16).view(np.uint8)
    file = write(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q6_K, raw.reshape(10, -1))
    assert exact_groups(file, "token_embd.weight", bits) is None
    weights = GGUFWeights(file.path, RANDOM_CONFIGS["llama-tiny"])
    rows = weights.read_groups("model.embed_tokens.weight", bits).dequantized()
    expected = torch.from_numpy(file.tensor("token_embd.weight").copy())
    assert expected.abs().max() > 0.5, "numbers worth rounding"
    largest = expected.view(10, -1, GROUP).abs().amax(-1, keepdim=True).expand(-1, -1, GROUP).reshape(10, -1)
    assert ((rows - expected).abs() <= largest / levels * (0.51 if bits == 8 else 1.0)).all()


def test_scales_beyond_half_precision_are_not_taken_from_the_file(tmp_path: Path) -> None:
    raw = q4_k(1, 1)
    raw[:, :4] = np.array([60_000.0, 60_000.0], np.float16).view(np.uint8)
    file = write(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q4_K, raw)
    assert exact_groups(file, "token_embd.weight", 4) is None
