"""Attention over a KV pool of 8 bits: its error beside the reference, and its time beside a bfloat16 pool.

The keys and values are those that `rope_and_cache` writes. The pools do not fit in the device's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu_sections.measure import captured, median_seconds
from benchmarks.gpu_sections.paged import Chunks, Shape, chunks_of, random_heads, scratch
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from core.kv_layout import FLOAT8, KVLayout
from engine.gpu import reference
from engine.gpu.ops import ops
from engine.kv_pool import KVPool
from engine.rotary import RotaryTable

SHAPE, BATCH, CONTEXT = Shape(8, 4, 128), 32, 4096
TINY_SHAPE, TINY_BATCH, TINY_CONTEXT = Shape(2, 2, 16), 2, 40
PROMPT = 1024  # tokens of a chunk of prefill, behind a cached prefix
MOST_ERROR = 2e-2
LEAST_RATIO = {"decode_attention": 1.4, "prefill_attention": 0.7}  # to bfloat16: half the bytes, and conversions
CASE_S = 6.0


@dataclass(frozen=True, slots=True)
class Filled:
    """A pool with the contexts of all chunks, and heads whose first rows are the queries."""

    pool: KVPool
    heads: torch.Tensor  # rotated, [T, Hq + 2 * Hkv, D]


def run(section: Section) -> None:
    shape, batch, context = SHAPE, BATCH, CONTEXT
    if section.rehearse:
        shape, batch, context = TINY_SHAPE, TINY_BATCH, TINY_CONTEXT
    if not section.has_time_for(0 if section.rehearse else CASE_S, "attention over fp8 KV"):
        return
    num_blocks, prompt = batch * -(-context // shape.block_size), min(PROMPT, context // 2)
    decodes = chunks_of([context - 1] * batch, [1] * batch, shape.block_size, num_blocks, section.device)
    first = Chunks(
        decodes.block_ids, decodes.first_row[:1], decodes.first_block[:1], decodes.start[:1], decodes.num_tokens[:1], 1
    )
    behind_prefix = replace(
        first, start=first.start + 1 - prompt, num_tokens=first.num_tokens * prompt, num_rows=prompt
    )
    pools = {
        dtype: filled(shape, decodes, num_blocks, context, dtype, section.device) for dtype in (FLOAT8, "bfloat16")
    }
    for operator, measure, timed, compared in (
        ("decode_attention", f"{batch} x {context:,}", decodes, first),
        ("prefill_attention", f"{prompt:,} tokens at {context - prompt:,}", behind_prefix, behind_prefix),
    ):
        results = []
        for implementations in (ops, reference):
            attended = torch.zeros(len(pools[FLOAT8].heads), shape.num_heads, shape.head_dim, device=section.device)
            work_on(pools[FLOAT8], shape, compared, getattr(implementations, operator), attended)()
            results.append(attended)
        error = float((results[0] - results[1]).norm() / results[1].norm())
        section.add(Line(f"{operator}, fp8 KV: error", error, "", most=MOST_ERROR))
        seconds = {}
        for dtype, pool in pools.items():
            attended = torch.empty_like(pool.heads[:, : shape.num_heads])
            work = work_on(pool, shape, timed, getattr(ops, operator), attended)
            seconds[dtype] = median_seconds(captured(work, section.device), section.device)
        ours, plain = seconds[FLOAT8] * 1e6, seconds["bfloat16"] * 1e6
        ratio = LEAST_RATIO[operator]
        section.add(Line(f"{operator}, fp8 KV, {measure}", ours, "us", "bfloat16 KV", plain, least_ratio=ratio))


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


def work_on(
    filled: Filled, shape: Shape, chunks: Chunks, operator: Callable[..., None], attended: torch.Tensor
) -> Callable[[], None]:
    """A call of one of the two attention operators, without host synchronisation."""
    pool = filled.pool
    arguments = [filled.heads, pool.tensor, 0, chunks.block_ids, chunks.first_row, chunks.first_block]
    if chunks.num_rows > len(chunks.start):
        arguments += [chunks.start, chunks.num_tokens, *chunks.tiles()]
    else:
        partial = scratch(shape, len(chunks.start), len(filled.heads), attended.device)
        arguments += [chunks.num_positions, partial]
    return functools.partial(operator, *arguments, attended, pool.scales)
