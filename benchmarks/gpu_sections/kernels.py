"""Products with fp8 weights and attention over a KV pool of 8 bits, beside the same work in bfloat16.

The shapes are those of an 8B model. Weights and pools do not fit in the device's cache. The keys and values are those
that `rope_and_cache` writes. tests/gpu and tests/kernels compare the results with the references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu_sections.measure import captured, median_seconds
from benchmarks.gpu_sections.paged import Chunks, Shape, chunks_of, random_heads, scratch
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from core.kv_layout import FLOAT8, KVLayout
from engine.fp8 import Fp8Matrix
from engine.gpu.linear import Fp8Linear
from engine.gpu.ops import ops
from engine.gpu.step_attention import ExpandedPrompts
from engine.kv_pool import KVPool
from engine.rotary import RotaryTable

MATRICES, TINY_MATRICES = [(4096, 28_672), (14_336, 4096)], [(48, 112)]  # (columns, rows)
# tokens -> goal: half the bytes, twice the rate
PRODUCT_RATIOS = {1: 1.5, 32: 1.5, 64: 1.2, 256: 1.2, 512: 1.2, 2048: 1.5}
TINY_PRODUCTS = (1, 512)  # tokens: both ways to multiply. A row takes the interpreter 10 ms
ATTENTION_RATIOS = {"decode_attention": 1.4, "prefill_attention": 0.8}  # half the bytes, and conversions
SHAPE, BATCH, CONTEXT = Shape(8, 4, 128), 32, 4096
TINY_SHAPE, TINY_BATCH, TINY_CONTEXT = Shape(2, 2, 16), 2, 40
PROMPT = 1024  # tokens of a chunk of prefill, behind a cached prefix
CASE_S = 5.0


@dataclass(frozen=True, slots=True)
class Filled:
    """A pool with the contexts of all chunks, and heads whose first rows are the queries."""

    pool: KVPool
    heads: torch.Tensor  # rotated, [T, Hq + 2 * Hkv, D]


def run(section: Section) -> None:
    for size, num_rows in TINY_MATRICES if section.rehearse else MATRICES:
        if section.has_time_for(CASE_S, f"products of {size:,} x {num_rows:,}"):
            measure_products(section, size, num_rows)
    if section.has_time_for(2 * CASE_S, "attention over fp8 KV"):
        measure_attention(section)


def measure_products(section: Section, size: int, num_rows: int) -> None:
    weight = torch.randn(num_rows, size, device=section.device) * size**-0.5
    matrix = Fp8Matrix(num_rows, size, torch.bfloat16, section.device)
    matrix.put(0, weight)
    multiply, plain = Fp8Linear(matrix, None), weight.bfloat16()
    for num_tokens in TINY_PRODUCTS if section.rehearse else PRODUCT_RATIOS:
        inputs = torch.randn(num_tokens, size, device=section.device).bfloat16()
        ours = seconds_of(section, functools.partial(multiply, inputs))
        theirs = seconds_of(section, functools.partial(F.linear, inputs, plain))
        name = f"product with fp8 weights, {num_tokens:,} x {size:,} x {num_rows:,}"
        section.add(
            Line(name, ours * 1e6, "us", "torch, bfloat16", theirs * 1e6, least_ratio=PRODUCT_RATIOS[num_tokens])
        )


def measure_attention(section: Section) -> None:
    shape, batch, context = (TINY_SHAPE, TINY_BATCH, TINY_CONTEXT) if section.rehearse else (SHAPE, BATCH, CONTEXT)
    num_blocks, prompt = batch * -(-context // shape.block_size), min(PROMPT, context // 2)
    decodes = chunks_of([context - 1] * batch, [1] * batch, shape.block_size, num_blocks, section.device)
    behind_prefix = Chunks(
        decodes.block_ids[: -(-context // shape.block_size)],
        decodes.first_row[:1],
        decodes.first_block[:1],
        start=decodes.start[:1] + 1 - prompt,
        num_tokens=decodes.num_tokens[:1] * prompt,
        num_rows=prompt,
    )
    pools = [filled(shape, decodes, num_blocks, context, dtype, section.device) for dtype in (FLOAT8, "bfloat16")]
    for operator, work, measure, chunks in (
        ("decode_attention", decode_work, f"{batch} x {context:,}", decodes),
        ("prefill_attention", prefill_work, f"{prompt:,} tokens at {context - prompt:,}", behind_prefix),
    ):
        ours, plain = (seconds_of(section, work(pool, shape, chunks)) for pool in pools)
        ratio = ATTENTION_RATIOS[operator]
        name = f"{operator}, fp8 KV, {measure}"
        section.add(Line(name, ours * 1e6, "us", "bfloat16 KV", plain * 1e6, least_ratio=ratio))


def seconds_of(section: Section, work: Callable[[], object]) -> float:
    return median_seconds(captured(work, section.device), section.device)


def filled(shape: Shape, chunks: Chunks, num_blocks: int, context: int, dtype: str, device: torch.device) -> Filled:
    """Every context is written by one call of `rope_and_cache`."""
    layout = KVLayout("kv", dtype, 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = KVPool(layout, num_blocks, device)
    table = RotaryTable(torch.rand(shape.head_dim // 2, device=device), context)
    positions = torch.arange(context, device=device, dtype=torch.int32)
    torch.manual_seed(0)  # the pools hold the same keys and values
    for first in chunks.first_block.tolist():
        blocks = chunks.block_ids[first + positions.long() // shape.block_size]
        heads = random_heads(shape, context, torch.bfloat16, device)
        slots = blocks * shape.block_size + positions % shape.block_size
        ops.rope_and_cache(heads, table.cosine, table.sine, positions, slots.int(), pool.tensor, 0, pool.scales)
    return Filled(pool, heads)


def decode_work(filled: Filled, shape: Shape, chunks: Chunks) -> Callable[[], None]:
    pool, heads = filled.pool, filled.heads
    attended = torch.empty_like(heads[:, : shape.num_heads])
    partial = scratch(shape, len(chunks.start), len(heads), heads.device)
    inputs = (chunks.block_ids, chunks.first_row, chunks.first_block, chunks.num_positions, partial, attended)
    return functools.partial(ops.decode_attention, heads, pool.tensor, 0, *inputs, pool.scales)


def prefill_work(filled: Filled, shape: Shape, chunks: Chunks) -> Callable[[], None]:
    """In a pool of 8 bits, the work includes the expansion of the chunk's blocks."""
    pool, heads = filled.pool, filled.heads
    attended = torch.empty_like(heads[:, : shape.num_heads])
    inputs = (chunks.first_row, chunks.first_block, chunks.start, chunks.num_tokens, *chunks.tiles())
    if pool.scales is None:
        arguments = (heads, pool.tensor, 0, chunks.block_ids, *inputs, attended)
        return functools.partial(ops.prefill_attention, *arguments)
    expanded = ExpandedPrompts(pool.tensor, pool.scales, chunks.block_ids, heads)
    return functools.partial(expanded.attend, heads, 0, inputs, attended)
