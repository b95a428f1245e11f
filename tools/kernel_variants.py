"""Launches that cover the compiled variants of every kernel: `tests/kernels/test_compile.py` compiles them for sm_90.

A launch calls the launcher of a kernel with meta tensors of real sizes. So the launcher itself chooses the types and
the constants, as it does in service, and Triton sees the strides of a large pool. Nothing runs.

`in_ci` marks the few that every test run compiles: the served dtype, and where a shape changes the code. The others run
on demand: `python -m tools.compile_kernels --all`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from core.request import MAX_LOGPROBS
from engine.fp8 import CODES
from engine.gpu.digests import scratch_shape
from engine.gpu.kernels import KERNELS
from engine.gpu.tile_sizes import FEW_ROWS, FEW_ROWS_TILE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Variant(NamedTuple):
    name: str
    launch: Callable[[], object]
    in_ci: bool
    # Beginnings of the machine instructions that the code must contain, such as LDG.E.128 or HGMMA.
    instructions: tuple[str, ...] = ()


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def variants() -> Iterator[Variant]:
    yield from _elementwise()
    yield from _products()
    yield from _digests()
    yield from _sampling()
    yield from _attention()
    yield from _attention_with_scales()
    yield from _fp8_products()


def _elementwise() -> Iterator[Variant]:
    for dtype in DTYPES:
        served = dtype is torch.bfloat16
        for size in (576, 4096, 8192, 16384):
            rows, weight = meta(256, size, dtype=dtype), meta(size, dtype=dtype)
            for update in (rows, None):
                yield Variant(
                    f"add_rms_norm {dtype} {size} {'with' if update is rows else 'without'} update",
                    partial(KERNELS["add_rms_norm"], rows, update, weight, 1e-5, rows),
                    in_ci=served and size in (4096, 16384) and update is rows,
                    instructions=("LDG.E.128", "STG.E.128"),
                )
        for size in (1536, 14336):
            yield Variant(
                f"silu_and_multiply {dtype} {size}",
                partial(KERNELS["silu_and_multiply"], meta(256, 2 * size, dtype=dtype), meta(256, size, dtype=dtype)),
                in_ci=served and size == 14336,
                instructions=("LDG.E.128", "STG.E.128"),
            )


def _products() -> Iterator[Variant]:
    for dtype in DTYPES[:2]:
        inputs, weight = meta(FEW_ROWS, 4096, dtype=dtype), meta(6144, 4096, dtype=dtype)
        outputs, counters = meta(FEW_ROWS, 6144, dtype=dtype), meta(6144 // FEW_ROWS_TILE, dtype=torch.int32)
        sums = meta(264 + len(counters), FEW_ROWS, FEW_ROWS_TILE, dtype=torch.float32)
        yield Variant(
            f"multiply_few_rows {dtype}",
            partial(KERNELS["multiply_few_rows"], inputs, weight, sums, counters, outputs),
            in_ci=dtype is torch.bfloat16,
            instructions=("LDG.E.128", "LDGSTS.E.BYPASS.128", "HGMMA", "ACQBULK"),  # the last: launched early
        )


def _digests() -> Iterator[Variant]:
    for block_bytes in (368640, 2 << 20):
        memory, blocks = meta(1 << 15, block_bytes, dtype=torch.uint8), meta(64, dtype=torch.int32)
        sums, digests = meta(*scratch_shape(64, block_bytes), dtype=torch.int64), meta(64, dtype=torch.int64)
        yield Variant(
            f"block_digests {block_bytes} bytes",
            partial(KERNELS["block_digests"], memory, blocks, sums, digests),
            in_ci=block_bytes == 2 << 20,
            instructions=("LDG.E.128", "STG.E.128"),
        )


def _sampling() -> Iterator[Variant]:
    """All are in float32. The vocabulary sets the constants: those of Qwen, Llama 3 and Llama 2."""
    for vocab in (151_936, 128_256, 32_000):
        rows = 32
        logits, ids = meta(rows, vocab, dtype=torch.float32), meta(rows, dtype=torch.int32)
        entries, starts = meta(9000, dtype=torch.int32), meta(rows + 1, dtype=torch.int32)
        doubles = meta(4 * rows, dtype=torch.float64)
        saved = meta(9000 + rows, dtype=torch.float32)
        adjusted = (logits, ids, starts, entries, entries, starts, doubles, doubles, ids, ids, saved)
        restored = (logits, ids, starts, entries, ids, ids, saved)
        drawn = (logits, ids, 16, 112, ids, doubles[: 3 * rows].view(-1, 3), meta(rows, dtype=torch.int64), ids)
        asked = (logits, ids, ids, MAX_LOGPROBS, meta(rows, MAX_LOGPROBS, dtype=torch.int32), logits)
        in_ci = vocab == 128_256
        yield Variant(f"argmax {vocab}", partial(KERNELS["argmax"], logits, ids), in_ci, ("LDG.E.128",))
        yield Variant(f"adjust_logits {vocab}", partial(KERNELS["adjust_logits"], *adjusted), in_ci)
        yield Variant(f"restore_logits {vocab}", partial(KERNELS["restore_logits"], *restored), in_ci)
        yield Variant(f"draw_tokens {vocab}", partial(KERNELS["draw_tokens"], *drawn), in_ci, ("LDG.E.128",))
        yield Variant(f"find_logprobs {vocab}", partial(KERNELS["find_logprobs"], *asked), in_ci, ("LDG.E.128",))


ATTENTION_IN_CI = {
    "rope_and_cache": [(torch.bfloat16, 128, 4)],  # Llama 8B
    # The served shape; an odd group, and float32, which has no matrix units
    "decode_attention": [(torch.bfloat16, 128, 4), (torch.float32, 64, 3)],
    # ... and the most registers
    "prefill_attention": [(torch.bfloat16, 128, 4), (torch.bfloat16, 256, 3), (torch.float32, 64, 3)],
}


def _attention() -> Iterator[Variant]:
    """The dtype, the head size and the group change the tiles. Kernels read all lengths and counts at run time."""
    copies = ("LDGSTS.E.BYPASS.128",)  # 16 bytes past the registers, while an earlier tile is computed
    for dtype, head_dim, group in itertools.product(DTYPES, (64, 80, 96, 128, 256), (1, 3, 4, 8)):
        step = AttentionStep(dtype, head_dim, group)
        instructions = {
            "rope_and_cache": ("LDG.E.128", "STG.E.128"),
            "decode_attention": copies,
            "prefill_attention": copies if dtype is torch.float32 else (*copies, "HGMMA"),
        }
        for name, in_ci in ATTENTION_IN_CI.items():
            yield Variant(
                f"{name} {dtype} head size {head_dim} group {group}",
                getattr(step, name),
                in_ci=(dtype, head_dim, group) in in_ci,
                instructions=instructions[name],
            )


def _attention_with_scales() -> Iterator[Variant]:
    """A pool of 8 bits."""
    for dtype, head_dim, group in itertools.product(DTYPES, (64, 80, 128, 256), (1, 3, 4, 8)):
        step = AttentionStep(dtype, head_dim, group, has_scales=True)
        copies = "LDGSTS.E" if dtype is torch.float32 else "LDGSTS.E.BYPASS.128"
        instructions = {"decode_attention": (copies,), "expand_kv": ("LDG.E", "STG.E.128")}
        for name in ("rope_and_cache", "decode_attention", "expand_kv"):
            yield Variant(
                f"{name} {dtype} with scales head size {head_dim} group {group}",
                getattr(step, name),
                in_ci=(dtype, head_dim, group) == (torch.bfloat16, 128, 4),
                instructions=instructions.get(name, ()),
            )


class AttentionStep:
    """The tensors of one step of a model with 8 KV heads."""

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int, has_scales: bool = False) -> None:
        num_heads, num_kv_heads, num_tokens = 8 * group, 8, 512
        self.heads = meta(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        self.attended = meta(num_tokens, num_heads, head_dim, dtype=dtype)
        shape = (32, 2, num_kv_heads, 16)
        self.pool, self.scales = meta(20_000, *shape, head_dim, dtype=dtype), None
        if has_scales:
            memory = meta(20_000, math.prod(shape) * (head_dim + 4), dtype=CODES)
            values, scales = memory.split([math.prod(shape) * head_dim, math.prod(shape) * 4], dim=1)
            self.pool = values.unflatten(1, (*shape, head_dim))
            self.scales = scales.view(torch.float32).unflatten(1, shape)
        self.angles = meta(4096, head_dim // 2, dtype=torch.float32)
        self.ints = meta(64, dtype=torch.int32)

    def rope_and_cache(self) -> None:
        KERNELS["rope_and_cache"](self.heads, self.angles, self.angles, self.ints, self.ints, self.pool, 3, self.scales)

    def decode_attention(self) -> None:
        num_chunks, (_, num_heads, head_dim) = len(self.ints), self.attended.shape
        partials = meta(num_chunks, num_heads, 8, head_dim + 2, dtype=torch.float32)
        KERNELS["decode_attention"](self.heads, self.pool, 3, *[self.ints] * 4, partials, self.attended, self.scales)

    def expand_kv(self) -> None:
        expanded = meta(len(self.ints), 1, *self.pool.shape[2:], dtype=self.heads.dtype)
        KERNELS["expand_kv"](self.pool, self.scales, 3, self.ints, 0, expanded)

    def prefill_attention(self) -> None:
        KERNELS["prefill_attention"](self.heads, self.pool, 3, *[self.ints] * 7, self.attended)


def _fp8_products() -> Iterator[Variant]:
    """The rows of an 8B model, and a row of more than one tile."""
    for dtype in DTYPES:
        for size in (4096, 14_336, 28_672):
            inputs, codes = meta(256, size, dtype=dtype), meta(256, size, dtype=CODES)
            products, scales = meta(256, size, dtype=torch.float32), meta(size, dtype=torch.float32)
            in_ci = dtype is torch.bfloat16 and size == 14_336
            yield Variant(
                f"quantize_rows {dtype} {size}",
                partial(KERNELS["quantize_rows"], inputs, codes, scales[:256]),
                in_ci,
                ("LDG.E.128",),
            )
            for bias in (None, meta(size, dtype=dtype)):
                yield Variant(
                    f"scale_products {dtype} {size}{'' if bias is None else ' with bias'}",
                    partial(KERNELS["scale_products"], products, scales[:256], scales, bias, inputs),
                    in_ci=in_ci and bias is not None,
                    instructions=("LDG.E.128",),
                )
