"""Random cases for the C kernels, each computed by a kernel and by plain torch.

The sanitizer's test runs this file as a program in another process: `python kernel_cases.py LIBRARY`. The program ends
with a write out of bounds, which shows that the sanitizer watches.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from core.kv_layout import KVLayout
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.attention import TorchAttention
from engine.batch import Batch
from engine.cpu.attention import NativeAttention
from engine.cpu.dequantize import BLOCK, DTYPES, KINDS, dequantize_into
from engine.cpu.kernels import Kernels, usable_flags
from engine.cpu.linear import NativeLinear
from engine.cpu.ops import NativeOps
from engine.cpu.quantized_linear import NativeQuantizedLinear
from engine.cpu.sampling import NativeDraw
from engine.host_memory import HugePages
from engine.kv_pool import TORCH_DTYPES, KVPool
from engine.linear import PlainLinear
from engine.ops import TorchOps
from engine.quantization import GROUP, QuantizedMatrix, quantize
from engine.rotary import RotaryTable
from engine.sampling import exponentials, filtered_distribution, masked

# bfloat16 has 8 bits: two roundings of a value near 4 differ by at most 1/64. Torch also rounds between its steps.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}
VANISHING = 1e-30  # as in quantized_linear.c
Difference = tuple[str, float]  # name of the comparison, largest difference (of quantized: relative)


class AttentionCase:
    """A pool of random bytes, and chunks of random lengths over random block tables."""

    def __init__(self, seed: int, dtype: str, head_dim: int, longest: int = 300) -> None:
        draw = random.Random(seed)
        self.num_kv_heads = draw.choice([1, 2, 3, 4])
        self.num_heads = self.num_kv_heads * draw.choice([1, 2, 3, 4, 5, 7, 8])
        self.layout = KVLayout(
            model="case",
            dtype=dtype,
            num_layers=draw.choice([1, 3]),
            num_kv_heads=self.num_kv_heads,
            block_size=draw.choice([1, 5, 16, 32, 80]),
            head_dim=head_dim,
        )
        heads = f"{self.num_heads}/{self.num_kv_heads} x {head_dim}"
        self.name = f"seed {seed}: {dtype} heads {heads} block {self.layout.block_size}"
        chunks = [(draw.randrange(longest), draw.choice([1, 1, 1, draw.randrange(2, 150)])) for _ in range(5)]
        chunks += [(0, 1), (0, draw.randrange(2, 80)), (63, 1), (64, 2), (draw.randrange(506, 516), 7)]
        draw.shuffle(chunks)
        needed = [self.layout.num_blocks_for(start + count) for start, count in chunks]
        numbers = list(range(sum(needed) + 2))
        draw.shuffle(numbers)
        self.num_blocks = len(numbers)
        self.chunks = [
            self._chunk(f"s{i}", start, count, [numbers.pop() for _ in range(blocks)])
            for i, ((start, count), blocks) in enumerate(zip(chunks, needed, strict=True))
        ]
        self.generator = torch.Generator().manual_seed(seed)
        self.num_rows = sum(chunk.num_tokens for chunk in self.chunks)
        self.heads = self._random(self.num_rows, self.num_heads + 2 * self.num_kv_heads, head_dim)
        self.batch = Batch.of(self.chunks)
        frequencies = 10_000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
        self.rotation = RotaryTable(frequencies, 1000).rows(self.batch.positions)
        self.contents = self._random(self.num_blocks, *self.layout.block_shape)
        for block in numbers:  # unused blocks: a kernel that reads one returns NaN
            self.contents[block] = float("nan")

    def _chunk(self, name: str, start: int, count: int, table: list[int]) -> ScheduledChunk:
        return ScheduledChunk(
            SequenceView(name, (), start, table, SamplingParams(max_tokens=1)), start, count, True, False
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(TORCH_DTYPES[self.layout.dtype])

    def pool(self) -> KVPool:
        pool = KVPool(self.layout, self.num_blocks, torch.device("cpu"))
        pool.tensor.copy_(self.contents)
        return pool

    def part_of(self, number: int, part: slice) -> ScheduledChunk:
        """A part of the tokens of a chunk."""
        chunk = self.chunks[number]
        tokens = range(chunk.start, chunk.start + chunk.num_tokens)[part]
        return chunk._replace(start=tokens.start, num_tokens=len(tokens))

    def native(self, kernels: Kernels, pool: KVPool, num_threads: int = 1) -> NativeAttention:
        return NativeAttention(kernels, pool, self.num_heads, num_threads)

    def differences(self, kernels: Kernels, num_threads: int = 1) -> list[Difference]:
        ours, theirs = self.pool(), self.pool()
        native = self.native(kernels, ours, num_threads).begin_step(self.batch, self.rotation)
        reference = TorchAttention(theirs).begin_step(self.batch, self.rotation)
        layer = self.layout.num_layers - 1
        attended = native.attend(self.heads.clone(), layer).clone()
        expected = reference.attend(self.heads.clone(), layer)
        return [
            (f"attention, {self.name}", largest_difference(attended, expected)),
            (f"pool, {self.name}", largest_difference(ours.tensor, theirs.tensor)),
        ]


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of any element; infinite if only one of two elements is NaN."""
    ours, theirs = ours.double(), theirs.double()
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    return (ours - theirs).nan_to_num().abs().max().item()


def ops_differences(kernels: Kernels, seed: int, dtype: str, num_threads: int = 1) -> list[Difference]:
    """The norm with and without the residual sum, and the activation, on odd sizes."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, size = draw.choice([1, 2, 7, 33]), draw.choice([1, 15, 16, 31, 48, 576, 1000])
    name = f"seed {seed}: {dtype} {rows} x {size}"

    def tensor(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 2).to(TORCH_DTYPES[dtype])

    native, reference = NativeOps(kernels, num_threads), TorchOps()
    found = []
    for update in (None, tensor(rows, size)):
        hidden, weight = tensor(rows, size), tensor(size)
        ours, theirs = hidden.clone(), hidden.clone()
        normed = native.add_rms_norm(ours, None if update is None else update.clone(), weight, 1e-5)
        expected = reference.add_rms_norm(theirs, update, weight, 1e-5)
        found += [(f"norm, {name}", largest_difference(normed, expected))]
        found += [(f"sum, {name}", largest_difference(ours, theirs))]
    gate_up = tensor(rows, 2 * size) * 8
    gate_up[:, 0] = draw.choice([-200.0, 200.0, 0.0])
    ours, theirs = native.silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up)
    scale = 1.0 + theirs.float().abs().max().item()
    return [*found, (f"silu, {name}", largest_difference(ours, theirs) / scale)]


def linear_differences(kernels: Kernels, seed: int, num_threads: int = 1) -> list[Difference]:
    """Products with packed bfloat16 matrices, with every ending, on odd sizes.

    Empty if the library has no such kernel.
    """
    if kernels.bf16_linear is None:
        return []
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = draw.choice([1, 2, 5, 12, 13, 31, 33, 45, 481, 520])
    out_size = draw.choice([1, 7, 15, 16, 31, 32, 33, 49, 96, 200])
    in_size = draw.choice([2, 6, 64, 250, 576])

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight, inputs = tensor(2 * out_size, in_size) * in_size**-0.5, tensor(rows, in_size)
    bias = tensor(out_size) if draw.random() < 0.5 else None
    native, reference = NativeLinear(kernels, num_threads, SeparateAllocations()), PlainLinear()
    exact, gates = inputs.float(), weight.float()
    one = weight[:out_size].clone()
    products = {
        "linear": (
            native.prepare(one, bias)(inputs),
            F.linear(exact, one.float(), None if bias is None else bias.float()),
        ),
        "head": (native.prepare_head(one)(inputs), reference.prepare_head(one.float())(exact)),
        "gated": (native.prepare_gated(weight)(inputs), reference.prepare_gated(gates)(exact)),
    }
    assert products["head"][0].dtype is torch.float32
    return [
        (f"{what}, seed {seed}: {rows} x {in_size} x {out_size}", relative(ours, theirs))
        for what, (ours, theirs) in products.items()
    ]


def draw_differences(kernels: Kernels, seed: int) -> list[Difference]:
    """How far the score of the kernel's token is below the best score; infinite for a token that a filter drops."""
    draw = random.Random(seed)
    vocab, spread = draw.choice([1, 2, 15, 33, 300, 5000]), draw.choice([0.0, 0.3, 2.0, 30.0])
    logits = np.random.default_rng(seed).normal(0.0, spread, vocab).astype(np.float32)
    if draw.random() < 0.3:
        logits = logits.round()  # for many ties
    if draw.random() < 0.3:
        logits[draw.randrange(vocab)] = -np.inf if vocab > 1 else 0.0
    sampling = SamplingParams(
        max_tokens=1,
        temperature=draw.choice([0.2, 1.0, 1.7]),
        top_k=draw.choice([0, 0, 1, 7, vocab // 2, vocab]),
        top_p=draw.choice([1.0, 1.0, 0.95, 0.5, 0.001]),
        min_p=draw.choice([0.0, 0.0, 0.1, 1.0]),
    )
    flags = np.random.default_rng(seed).random(vocab) < draw.choice([0.02, 0.5, 0.98])
    flags[draw.randrange(vocab)] = True  # a mask allows a token
    allowed = draw.choice([None, np.packbits(flags, bitorder="little").tobytes()])
    if allowed is not None and np.isneginf(masked(logits, allowed)).all():
        allowed = None
    among = logits if allowed is None else masked(logits, allowed)
    token_ids, probabilities = filtered_distribution(among, sampling)
    native, found = NativeDraw(kernels), []
    for key in (draw.getrandbits(64) for _ in range(8)):
        with np.errstate(divide="ignore"):
            scores = dict(zip(token_ids, np.log(probabilities) - np.log(exponentials(key, token_ids)), strict=True))
        below = max(scores.values()) - scores.get(native(logits, sampling, key, allowed), float("-inf"))
        found.append((f"draw, seed {seed}: {vocab} tokens, {sampling}, key {key}, {allowed!r}", float(below)))
    return found


# ---- quantized matrices


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
    # Torch would compute 127.0 / largest as 127.0 * (1 / largest), which rounds twice.
    factor = torch.where(largest >= VANISHING, torch.full_like(largest, 127.0) / largest, 0.0)
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


def all_differences(
    kernels: Kernels, dtype: str, head_dims: tuple[int, ...], seeds: range, num_threads: int = 1
) -> list[Difference]:
    found = []
    for seed in seeds:
        case = AttentionCase(seed, dtype, head_dims[seed % len(head_dims)], longest=150)
        found += case.differences(kernels, num_threads) + ops_differences(kernels, seed, dtype, num_threads)
        found += quantized_differences(kernels, seed, dtype, num_threads)
        if dtype == "bfloat16":
            found += linear_differences(kernels, seed, num_threads)
        else:
            found += draw_differences(kernels, seed)
    return found


def dequantize_every_kind(kernels: Kernels) -> None:
    """Without a comparison, which `test_dequantize.py` makes."""
    for kind, (_, num_bytes) in KINDS.items():
        for dtype in DTYPES:
            slot, raw = torch.empty(3, 2 * BLOCK, dtype=dtype), np.ones((3, 2 * num_bytes), np.uint8)
            assert dequantize_into(kernels, slot, kind, raw)


def main(library: str) -> None:
    usable_flags()  # asks for AMX's registers
    kernels = Kernels(Path(library))
    torch.set_num_threads(1)
    dequantize_every_kind(kernels)
    for dtype, tolerance in TOLERANCE.items():
        found = all_differences(kernels, dtype, (32, 64, 96), range(8), num_threads=3)
        wrong = [difference for difference in found if not difference[1] <= tolerance]
        if wrong:
            raise SystemExit(f"{wrong}")
        print(f"{dtype}: {len(found)} comparisons within {tolerance}", flush=True)
    rows, too_short = torch.ones(4, 64), torch.empty(4, 31)
    kernels.silu_and_multiply(rows.data_ptr(), too_short.data_ptr(), 4, 32, 0, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
