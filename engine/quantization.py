"""Weights of 8 or 4 bits: quantization, and the layout of codes in memory.

A row is divided into groups of 32 columns. Each group has a scale in half precision and, for 4 bits, a minimum:

    int8    weight = (code - 128) * scale       codes 1 to 255       8.5 bits per weight, like GGUF's Q8_0
    int4    weight = code * scale + minimum     codes 0 to 15        5 bits per weight, like GGUF's Q4_1

`GroupedRows` is the plain form, with one byte per code. It exists for one tensor at a time during loading.
`QuantizedMatrix` is the final form, with packed codes and interleaved rows; engine/cpu/csrc/quantized.h draws it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.fp8 import FP8
from engine.host_memory import HugePages

GROUP = 32  # columns that share a scale
TILE_ROWS = 48  # interleaved rows
BITS = {"int8": 8, "int4": 4}  # by the name of the option
_STORED_BITS = {"int8": 8.5, "int4": 5.0, FP8: 8.0}  # with the scales and minimums of groups
_LARGEST_HALF = 65504.0


def weight_bytes(dtype: str, quantization: str) -> float:
    """Mean bytes of a weight of the layers. `dtype` is that of weights that are not quantized, e.g. bfloat16."""
    bits = _STORED_BITS.get(quantization)
    return {"float32": 4.0}.get(dtype, 2.0) if bits is None else bits / 8


def head_weight_bytes(dtype: str, quantization: str) -> float:
    """Bytes of a weight of the embedding and the head, which have more bits than the others."""
    return weight_bytes(dtype, {"int4": "int8", FP8: "none"}.get(quantization, quantization))


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows of a matrix as codes. Zeros pad the last group."""

    codes: torch.Tensor  # uint8 [rows, groups * GROUP]
    scales: torch.Tensor  # float16 [rows, groups]
    minimums: torch.Tensor | None  # float16 [rows, groups]; None for 8 bits, where code 128 is zero
    num_columns: int

    @property
    def bits(self) -> int:
        return 8 if self.minimums is None else 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.num_columns))

    def rows(self, order: torch.Tensor) -> GroupedRows:
        """The same rows in another order. # order: int64 [rows]"""
        minimums = None if self.minimums is None else self.minimums[order]
        return GroupedRows(self.codes[order], self.scales[order], minimums, self.num_columns)

    def dequantized(self) -> torch.Tensor:
        """# -> float32 [rows, num_columns]"""
        codes = self.codes.view(*self.scales.shape, GROUP).float()
        scales = self.scales.float()[..., None]
        values = (codes - 128) * scales if self.minimums is None else codes * scales + self.minimums.float()[..., None]
        return values.flatten(1)[:, : self.num_columns]


def quantize(weight: torch.Tensor, bits: int) -> GroupedRows:
    """Quantize a matrix to groups of `bits`. # weight: any float [rows, columns]"""
    num_columns = weight.shape[1]
    values = F.pad(weight.float(), (0, -num_columns % GROUP)).view(weight.shape[0], -1, GROUP)
    if bits == 8:
        scales = _half(values.abs().amax(-1) / 127)
        codes = (values * _inverse(scales)).round_().clamp_(-127, 127) + 128
        return GroupedRows(codes.to(torch.uint8).flatten(1), scales, None, num_columns)
    minimums = _half(values.amin(-1))
    scales = _half((values.amax(-1) - minimums.float()) / 15)
    codes = _four_bit_codes(values, scales, minimums)
    scales, minimums = _least_squares_fit(values, codes, scales, minimums)
    codes = _four_bit_codes(values, scales, minimums)
    return GroupedRows(codes.to(torch.uint8).flatten(1), scales, minimums, num_columns)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, the factor of a group; 0 if the scale is 0."""
    wide = scales.float()[..., None]
    return torch.where(wide > 0, 1 / wide, 0.0)


def _four_bit_codes(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    return ((values - minimums.float()[..., None]) * _inverse(scales)).round_().clamp_(0, 15)


def _least_squares_fit(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of the least-squares line through (code, value); the old ones if their error is smaller.

    The smallest and the largest value of a group are often outliers. A line fitted to all 32 values usually has a
    smaller total error than the line through these two.
    """
    code_mean, value_mean = codes.mean(-1), values.mean(-1)
    centred = codes - code_mean[..., None]
    spread = centred.square().sum(-1)
    slope = torch.where(spread > 0, (centred * values).sum(-1) / spread, 0.0)
    new_scales, new_minimums = _half(slope), _half(value_mean - slope * code_mean)
    before = _squared_error(values, codes, scales, minimums)
    new_codes = _four_bit_codes(values, new_scales, new_minimums)
    better = _squared_error(values, new_codes, new_scales, new_minimums) < before
    return torch.where(better, new_scales, scales), torch.where(better, new_minimums, minimums)


def _squared_error(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    return (codes * scales.float()[..., None] + minimums.float()[..., None] - values).square().sum(-1)


class QuantizedMatrix:
    """A quantized matrix [num_rows, num_columns]. `put` writes each row once, in any order."""

    def __init__(self, num_rows: int, num_columns: int, bits: int, dtype: torch.dtype, memory: HugePages) -> None:
        self.num_rows, self.num_columns, self.bits = num_rows, num_columns, bits
        self.dtype = dtype  # of inputs, outputs and dequantized rows
        num_tiles, self.num_groups = -(-num_rows // TILE_ROWS), -(-num_columns // GROUP)
        words = GROUP * bits // 32

        def take(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return memory.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        self.codes = take(torch.int32, num_tiles, self.num_groups, words, TILE_ROWS)
        self.scales = take(torch.float16, num_tiles, self.num_groups, TILE_ROWS)
        self.minimums = take(torch.float16, num_tiles, self.num_groups, TILE_ROWS) if bits == 4 else None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.num_columns))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.minimums)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def put(self, first_row: int, rows: GroupedRows) -> None:
        """Write `rows` from `first_row` on."""
        assert (rows.bits, rows.num_columns) == (self.bits, self.num_columns), "the rows do not fit this matrix"
        places = torch.arange(first_row, first_row + rows.codes.shape[0])
        tile, lane = places // TILE_ROWS, places % TILE_ROWS
        self.codes[tile, :, :, lane] = _packed(rows)
        self.scales[tile, :, lane] = rows.scales
        if self.minimums is not None:
            assert rows.minimums is not None
            self.minimums[tile, :, lane] = rows.minimums

    def slot(self, first_row: int, num_rows: int) -> MatrixSlot:
        return MatrixSlot(self, first_row, num_rows)

    def grouped(self, row_ids: torch.Tensor) -> GroupedRows:
        """# row_ids: int64 [n] -> n rows"""
        tile, lane = row_ids // TILE_ROWS, row_ids % TILE_ROWS
        packed = self.codes[tile, :, :, lane].contiguous().view(torch.uint8).view(len(row_ids), -1, 4)
        if self.bits == 4:
            packed = torch.stack((packed & 0xF, packed >> 4), dim=2)
        minimums = None if self.minimums is None else self.minimums[tile, :, lane]
        return GroupedRows(packed.reshape(len(row_ids), -1), self.scales[tile, :, lane], minimums, self.num_columns)

    def dequantized(self) -> torch.Tensor:
        """The whole matrix, dequantized. # -> self.dtype [num_rows, num_columns]"""
        return self.grouped(torch.arange(self.num_rows)).dequantized().to(self.dtype)


def _packed(rows: GroupedRows) -> torch.Tensor:
    """# -> int32 [rows, groups, words of a group]"""
    num_rows, num_groups = rows.scales.shape
    if rows.bits == 8:
        return rows.codes.contiguous().view(torch.int32).view(num_rows, num_groups, -1)
    low, high = rows.codes.view(num_rows, num_groups, -1, 2, 4).unbind(3)
    return (low | high << 4).contiguous().view(torch.int32).view(num_rows, num_groups, -1)


@dataclass(frozen=True, slots=True)
class MatrixSlot:
    """A run of a quantized matrix's rows, which one tensor of a checkpoint fills."""

    matrix: QuantizedMatrix
    first_row: int
    num_rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.matrix.num_columns))

    @property
    def bits(self) -> int:
        return self.matrix.bits

    def put(self, rows: GroupedRows) -> None:
        assert rows.shape == self.shape, "the loader must compare shapes first"
        self.matrix.put(self.first_row, rows)
