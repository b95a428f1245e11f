"""The rates of the device, and the two layouts of the pool under attention's access.

In the block-major layout a layer touches one piece of each block; in the layer-major layout these pieces lie side by
side. Attention of all layers reads the same bytes in both.
"""

from __future__ import annotations

import torch

from benchmarks.gpu_sections.measure import captured, copy_rate, host_copy_rates, matrix_rate, median_seconds
from benchmarks.gpu_sections.paged import LAYOUTS, Shape, chunks_of, empty_pool, random_heads, scratch
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from engine.gpu.ops import ops

LLAMA_8B = Shape(num_kv_heads=8, group=4, head_dim=128, num_layers=32)
TINY = Shape(num_kv_heads=2, group=2, head_dim=16, num_layers=2)


def run(section: Section) -> None:
    small, device = section.rehearse, section.device
    copied = copy_rate(device, 1 << 16 if small else 1 << 32)
    section.add(Line("copy on the device, bytes read and written", copied / 1e12, "TB/s"))
    section.add(Line("bf16 product of square matrices", matrix_rate(device, 64 if small else 8192) / 1e12, "TFLOP/s"))
    up, down = host_copy_rates(device, 1 << 16 if small else 1 << 30)
    section.add(Line("copy from pinned host memory", up / 1e9, "GB/s"))
    section.add(Line("copy to pinned host memory", down / 1e9, "GB/s"))
    batch, context = (3, 40) if small else (32, 2048)
    for layout in LAYOUTS:
        read = attention_read_rate(TINY if small else LLAMA_8B, layout, batch, context, device)
        measure = f"decode attention, {batch} x {context:,} positions, {layout} pool"
        section.add(Line(measure, read / 1e12, "TB/s", floor=copied / 1e12))


def attention_read_rate(shape: Shape, layout: str, batch: int, context: int, device: torch.device) -> float:
    """Bytes of keys and values per second, of the attention of all layers of one decode step."""
    dtype = torch.bfloat16
    num_blocks = batch * -(-context // shape.block_size)
    pool = empty_pool(shape, num_blocks, layout, dtype, device).normal_()
    chunks = chunks_of([context - 1] * batch, [1] * batch, shape.block_size, num_blocks, device)
    heads = random_heads(shape, batch, dtype, device)
    attended = torch.empty(batch, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    partial = scratch(shape, batch, context, device)
    positions = chunks.num_positions

    def step() -> None:
        for layer in range(shape.num_layers):
            ops.decode_attention(
                heads, pool, layer, chunks.block_ids, chunks.first_row, chunks.first_block, positions, partial, attended
            )

    seconds = median_seconds(captured(step, device), device)
    return batch * context * shape.block_bytes(dtype) / shape.block_size / seconds
