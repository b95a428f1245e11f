"""Random cases for the C kernel of quantized matrices, each computed by the kernel and by plain torch."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from engine.cpu.kernels import Kernels
from engine.cpu.quantized_linear import NativeQuantizedLinear
from engine.host_memory import HugePages
from engine.kv_pool import TORCH_DTYPES
from engine.quantization import GROUP, QuantizedMatrix, quantize

Difference = tuple[str, float]  # name of the comparison, largest difference relative to the largest result


class SeparateAllocations(HugePages):
    """Allocates each piece separately, so that AddressSanitizer detects reads past a piece."""

    def take(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


def matrix_of(weight: torch.Tensor, bits: int, dtype: torch.dtype) -> QuantizedMatrix:
    """A quantized matrix whose first half is written last."""
    matrix = QuantizedMatrix(weight.shape[0], weight.shape[1], bits, dtype, SeparateAllocations())
    half = len(weight) // 2
    for start, rows in ((half, weight[half:]), (0, weight[:half])):
        if len(rows):
            matrix.put(start, quantize(rows, bits))
    return matrix


def rounded(inputs: torch.Tensor, fused: bool) -> torch.Tensor:
    """The inputs after the kernel's rounding to 8 bits: groups of 32, scaled by the largest element. -> float32

    `fused`: with fused multiply-add, the product is not rounded before it is rounded to a code. The difference matters
    for values halfway between two codes.
    """
    values = F.pad(inputs.float(), (0, -inputs.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = values.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, 127.0 / largest, 0.0)
    scaled = (values.double() * factor.double()).round().float() if fused else (values * factor).round()
    return (scaled * largest / 127.0).flatten(1)[:, : inputs.shape[1]]


def quantized_differences(kernels: Kernels, seed: int, dtype: str, num_threads: int = 1) -> list[Difference]:
    """Products and rows of matrices of odd sizes, with and without a bias, 8 and 4 bits."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, size = draw.choice([1, 2, 5, 6, 7, 13, 300]), draw.choice([1, 31, 32, 48, 250, 576])
    out_size = draw.choice([1, 15, 47, 48, 49, 96, 200])

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight, inputs = tensor(out_size, size), tensor(num_rows, size).to(TORCH_DTYPES[dtype])
    weight[0], inputs[num_rows // 2] = 0.0, 0.0
    inputs[:, 0] *= draw.choice([1.0, 100.0, 1e-35])
    bias = tensor(out_size).to(TORCH_DTYPES[dtype]) if draw.random() < 0.5 else None
    found = []
    for bits in (8, 4):
        matrix = matrix_of(weight, bits, TORCH_DTYPES[dtype])
        method = NativeQuantizedLinear(kernels, num_threads)
        plain = matrix.grouped(torch.arange(out_size)).dequantized().double()
        product = method.prepare(matrix, bias)(inputs)
        expected = [
            F.linear(rounded(inputs, fused).double(), plain, None if bias is None else bias.double())
            for fused in (True, False)
        ]
        name = f"seed {seed}: {dtype} {num_rows} x {size} x {out_size}, {bits} bits"
        found.append((f"product, {name}", min(relative(product, one) for one in expected)))
        row_ids = torch.tensor([out_size - 1, 0, out_size // 2])
        looked_up = method.prepare_embedding(matrix)(row_ids)
        found.append((f"rows, {name}", relative(looked_up, plain[row_ids].to(looked_up.dtype))))
    return found


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not ours.isfinite().all():
        return float("inf")
    return (ours.double() - theirs.double()).abs().max().item() / (1.0 + theirs.abs().max().item())
