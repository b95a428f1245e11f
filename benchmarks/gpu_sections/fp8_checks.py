"""The product with fp8 weights: its error beside the reference, and its time beside torch's product in bfloat16.

The matrices are those of an 8B model that do not fit in the device's cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpu_sections.measure import captured, median_seconds
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from engine.fp8 import Fp8Matrix
from engine.gpu import reference
from engine.gpu.linear import Fp8Linear

SHAPES = [(4096, 28_672), (14_336, 4096)]  # (columns, rows)
TINY_SHAPES = [(48, 112)]
NUM_TOKENS = (1, 32, 64, 2048)  # on both sides of each change of tiles
MOST_ERROR = 2e-2
LEAST_RATIO = {1: 1.5, 32: 1.5, 64: 1.2, 2048: 0.8}  # to bfloat16: twice the bytes, the same operations
CASE_S = 3.0


def run(section: Section) -> None:
    for size, num_rows in TINY_SHAPES if section.rehearse else SHAPES:
        weight = torch.randn(num_rows, size, device=section.device) * size**-0.5
        matrix = Fp8Matrix(num_rows, size, torch.bfloat16, section.device)
        matrix.put(0, weight)
        plain = weight.bfloat16()
        for num_tokens in NUM_TOKENS:
            name = f"fp8_linear, {num_tokens:,} x {size:,} x {num_rows:,}"
            if section.has_time_for(0 if section.rehearse else CASE_S, name):
                compare(section, name, matrix, plain, num_tokens)


def compare(section: Section, name: str, matrix: Fp8Matrix, plain: torch.Tensor, num_tokens: int) -> None:
    multiply = Fp8Linear(matrix, None)
    inputs = torch.randn(num_tokens, matrix.shape[1], device=section.device).bfloat16()
    found = multiply(inputs).float()
    expected = torch.empty_like(found)
    reference.fp8_linear(inputs, matrix.codes, matrix.scales, None, expected)
    error = float((found - expected).norm() / expected.norm())
    section.add(Line(f"{name}: error", error, "", most=MOST_ERROR))
    ours = median_seconds(captured(lambda: multiply(inputs), section.device), section.device)
    torch_s = median_seconds(captured(lambda: F.linear(inputs, plain), section.device), section.device)
    section.add(Line(name, ours * 1e6, "us", "torch, bfloat16", torch_s * 1e6, least_ratio=LEAST_RATIO[num_tokens]))
