"""The C kernel dequantizes GGUF blocks to the same bits as the gguf package and torch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from engine.cpu.dequantize import KINDS, dequantize_into
from engine.cpu.kernels import Kernels
from tests.support.c_kernels import need_kernels

ROWS, COLUMNS = 24, 96


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return need_kernels()


def random_blocks(kind: str, seed: int) -> np.ndarray:
    """Random bytes with finite scales and minimums, including zero, subnormal and negative ones."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // 32, num_bytes), dtype=np.uint8)
    num_halves = 2 if kind == "Q4_1" else 1
    halves = blocks[..., : 2 * num_halves].copy().view(np.float16)
    halves[~np.isfinite(halves)] = 0.0
    halves[0], halves[1] = np.float16(-6e-8), np.float16(65504)
    blocks[..., : 2 * num_halves] = halves.view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_equals_the_reference(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        raw = random_blocks(kind, seed)
        slot = torch.empty(ROWS, COLUMNS, dtype=dtype)
        assert dequantize_into(kernels, slot, kind, raw)
        expected = torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType[kind])).to(dtype)
        assert torch.equal(slot.view(torch.uint8), expected.view(torch.uint8))


def test_types_and_slots_without_a_kernel_are_not_filled(kernels: Kernels) -> None:
    raw = random_blocks("Q8_0", 0)
    slot = torch.zeros(ROWS, COLUMNS, dtype=torch.float16)
    assert not dequantize_into(kernels, slot, "Q8_0", raw)
    assert not dequantize_into(kernels, slot.bfloat16(), "Q6_K", raw)
    assert not slot.any()


def test_bytes_that_do_not_fill_the_slot_are_refused(kernels: Kernels) -> None:
    raw, slot = random_blocks("Q8_0", 0), torch.empty(ROWS, COLUMNS)
    with pytest.raises(AssertionError, match="reads every block"):
        dequantize_into(kernels, slot, "Q8_0", raw[:, :-34])
    with pytest.raises(AssertionError, match="blocks are whole"):
        dequantize_into(kernels, torch.empty(ROWS, 48), "Q8_0", raw)
