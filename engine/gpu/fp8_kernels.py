"""The Triton kernel of `fp8_linear`: inputs of the model's dtype times a matrix of e4m3 codes.

A program computes the outputs of some rows of the matrix for some tokens. The codes are the left operand: they become
the inputs' dtype in registers, from which Hopper's tensor cores read a left operand. The scale of a row is a factor of
its sums. With few tokens the product is bound by reading the codes, so a program has few rows and reads far ahead; with
many tokens it is bound by the tensor cores, so a program has many of both.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Tiles(NamedTuple):
    rows: int  # of the matrix
    tokens: int
    columns: int  # at a time
    warps: int
    stages: int  # tiles of columns in flight


def _tiles(num_tokens: int, dtype: torch.dtype) -> _Tiles:
    if dtype is torch.float32:  # exact products without tensor cores, for comparisons
        return _Tiles(32, 16, 32, 4, 2)
    if num_tokens <= 16:
        return _Tiles(32, 16, 256, 4, 4)
    if num_tokens <= 32:
        return _Tiles(32, 32, 256, 4, 4)
    if num_tokens <= 64:
        return _Tiles(64, 64, 128, 4, 4)
    return _Tiles(128, 128, 64, 8, 4)


def fp8_linear(
    inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor
) -> None:
    num_tokens, num_columns = inputs.shape
    num_rows = codes.shape[0]
    if num_tokens == 0:
        return
    assert codes.shape == (num_rows, num_columns)
    assert outputs.shape == (num_tokens, num_rows)
    assert codes.is_contiguous()
    assert inputs.stride(1) == outputs.stride(1) == scales.stride(0) == 1
    tiles = _tiles(num_tokens, inputs.dtype)
    # Programs of the same rows follow each other, so all but the first find the codes in the cache.
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, tiles.rows))
    _fp8_linear[grid](
        inputs,
        codes,
        scales,
        scales if bias is None else bias,
        outputs,
        num_tokens,
        num_rows,
        num_columns,
        inputs.stride(0),
        outputs.stride(0),
        HAS_BIAS=bias is not None,
        UPCAST=_INTERPRETED,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        COLUMNS=tiles.columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_linear(
    inputs,
    codes,
    scales,
    bias,
    outputs,
    num_tokens,
    num_rows,
    num_columns,
    inputs_stride,
    outputs_stride,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_token, is_row = tokens < num_tokens, rows < num_rows
    left = codes + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    right = inputs + tokens.to(tl.int64)[None, :] * inputs_stride + columns[:, None]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        inside = start + columns < num_columns
        weights = tl.load(left + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        values = tl.load(right + start, mask=is_token[None, :] & inside[:, None], other=0.0)
        if UPCAST:  # the interpreter's products in bfloat16 are wrong
            sums += tl.dot(weights.to(tl.float32), values.to(tl.float32), input_precision="ieee")
        else:
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    sums = sums * tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    places = outputs + tokens.to(tl.int64)[:, None] * outputs_stride + rows[None, :]
    tl.store(places, tl.trans(sums).to(outputs.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
