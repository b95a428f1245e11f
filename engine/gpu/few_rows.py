"""Products of few rows of inputs with a matrix. The reading of the matrix bounds them.

    T rows of inputs    N rows of the matrix    K columns    units: tiles of 64 rows and 128 columns, row by row

The units are shared out evenly, so all programs end at the same time. A tile of rows may belong to several programs:

    units        | tile 0 . . . . | tile 1 . . . . | tile 2 . . . . |
    programs     | program 0 . . . . . | program 1 . . . . . | pro...

The matrix units multiply a unit with the inputs of all T rows; more rows are zeros. The sums are float32. The last
program that ends a tile adds up the sums of the tile's programs in their order. So a product has the same bits at each
run, and those of a row do not depend on the other rows. A program reads its last unit before it waits for the kernels
that compute the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.attention_tiles import INTERPRETED, products
from engine.gpu.early_launch import early_launch, follow
from engine.gpu.tile_sizes import FEW_ROWS, FEW_ROWS_COLUMNS, FEW_ROWS_TILE

_TOKENS = 16  # rows of inputs in a product, padded
_STAGES = 5  # two programs fit in the shared memory of a processor


def multiply_few_rows(
    inputs: torch.Tensor, weight: torch.Tensor, partial: torch.Tensor, counters: torch.Tensor, outputs: torch.Tensor
) -> None:
    (num_rows, num_columns), num_tokens = weight.shape, len(inputs)
    assert 0 < num_tokens <= FEW_ROWS
    assert num_rows % FEW_ROWS_TILE == num_columns % FEW_ROWS_COLUMNS == 0
    assert inputs.is_contiguous()
    assert weight.is_contiguous()
    assert outputs.is_contiguous()
    _multiply_few_rows[(len(partial) - len(counters),)](
        inputs,
        weight,
        outputs,
        partial,
        counters,
        num_tokens,
        num_rows,
        num_columns,
        TOKENS=_TOKENS,
        TILE=FEW_ROWS_TILE,
        COLUMNS=FEW_ROWS_COLUMNS,
        STAGES=_STAGES,
        UPCAST=INTERPRETED,
        num_warps=4,
        **early_launch(),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_few_rows(
    inputs,  # [T, K]
    weight,  # [N, K]
    outputs,  # [T, N]
    partial,  # float32 [programs + tiles, T, TILE]
    counters,  # int32 [tiles]
    num_tokens,
    num_rows,
    num_columns,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    per_tile = num_columns // COLUMNS
    num_units = num_rows // TILE * per_tile
    first_unit = program * num_units // num_programs
    last_unit = (program + 1) * num_units // num_programs - 1
    row, column, token = tl.arange(0, TILE), tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    weights = weight + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    last_tile, last_column = last_unit // per_tile, last_unit % per_tile * COLUMNS
    read_last = tl.load(weights + last_tile.to(tl.int64) * TILE * num_columns + last_column)
    follow(EARLY)

    values = inputs + token[:, None] * num_columns + column[None, :]
    exists = (token < num_tokens)[:, None]
    read_last_values = tl.load(values + last_column, mask=exists, other=0.0)
    total = tl.zeros([TILE, TOKENS], tl.float32)
    for unit in tl.range(first_unit, last_unit, num_stages=STAGES):
        tile, first_column = unit // per_tile, unit % per_tile * COLUMNS
        part = tl.load(weights + tile.to(tl.int64) * TILE * num_columns + first_column)
        value = tl.load(values + first_column, mask=exists, other=0.0)
        total = tl.where(first_column > 0, total, 0.0)
        total = products(part, tl.trans(value), total, UPCAST)
        if first_column + COLUMNS == num_columns:
            _end_tile(total, tile, num_units, outputs, partial, num_tokens, num_rows, TILE)
    # Computed behind the loop, or the compiler would copy them to shared memory before the pipeline starts.
    last = tl.where((column < num_columns)[None, :], read_last, 0.0)
    last_values = tl.where(exists, read_last_values, 0.0)
    total = products(last, tl.trans(last_values), tl.where(last_column > 0, total, 0.0), UPCAST)
    _end_tile(total, last_tile, num_units, outputs, partial, num_tokens, num_rows, TILE)

    first_tile = first_unit // per_tile
    if first_tile < last_tile:
        _join_programs(first_tile, num_units, outputs, partial, counters, num_tokens, num_rows, TOKENS, TILE)
    _join_programs(last_tile, num_units, outputs, partial, counters, num_tokens, num_rows, TOKENS, TILE)


@triton.jit
def _programs_of(tile, num_units, num_rows, TILE: tl.constexpr):
    """The first and the last program of a tile."""
    per_tile = num_units // (num_rows // TILE)
    first = (tile * per_tile + 1) * tl.num_programs(0) - 1
    last = (tile + 1) * per_tile * tl.num_programs(0) - 1
    return first // num_units, last // num_units


@triton.jit
def _end_tile(total, tile, num_units, outputs, partial, num_tokens, num_rows, TILE: tl.constexpr):
    """Write the outputs of a tile of this program alone, or this program's sums of a tile of several programs."""
    first_program, last_program = _programs_of(tile, num_units, num_rows, TILE)
    if first_program < last_program:
        # From one part of a tile to the next, the program or the tile is another: their sum is a place for each part.
        part = partial + (tl.program_id(0) + tile) * num_tokens * TILE
        _store_rows(part, TILE, tl.trans(total), num_tokens)
    else:
        _store_rows(outputs + tile * TILE, num_rows, tl.trans(total), num_tokens)


@triton.jit
def _join_programs(
    tile, num_units, outputs, partial, counters, num_tokens, num_rows, TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """The last program to end a tile of several programs adds up their sums."""
    first_program, last_program = _programs_of(tile, num_units, num_rows, TILE)
    if first_program < last_program:
        tl.debug_barrier()  # all threads have written before one of them counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == last_program - first_program:
            tl.store(counters + tile, 0)
            row, token = tl.arange(0, TILE), tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, TILE], tl.float32)
            for program in range(first_program, last_program + 1):
                part = partial + ((program + tile) * num_tokens + token)[:, None] * TILE + row[None, :]
                total += tl.load(part, mask=(token < num_tokens)[:, None], other=0.0, cache_modifier=".cg")
            _store_rows(outputs + tile * TILE, num_rows, total, num_tokens)


@triton.jit
def _store_rows(target, stride, rows, num_rows):
    """Store the first `num_rows`."""
    row, column = tl.arange(0, rows.shape[0]), tl.arange(0, rows.shape[1])
    place = target + row[:, None] * stride + column[None, :]
    tl.store(place, rows.to(target.dtype.element_ty), mask=(row < num_rows)[:, None])
