"""Weights of 8 bits in floating point (e4m3): one scale for each row of a matrix.

    weight = code * scale        codes -448 to 448, 3 bits of mantissa; scale = the row's largest weight / 448

A product takes codes on both sides: the inputs of each token get codes and a scale of their own, as a row does. So a
token's result depends on no other token of the step. The embedding and the head stay in the dtype of the model, because
their rounding errors do most harm. `engine/quantization.py` has the integer formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

FP8 = "fp8"  # the name of the option
CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
# The scale of a row is its largest size / 448. A row of zeros counts as one with this size.
SMALLEST_MAXIMUM = 1e-30
_ROWS_AT_ONCE = 4096


class Fp8Matrix:
    """A quantized matrix [num_rows, num_columns]. `put` writes each row once, in any order."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype  # of dequantized rows
        self.codes = torch.empty(num_rows, num_columns, dtype=CODES, device=device)
        self.scales = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._one = torch.ones((), device=device)  # a scale that changes nothing

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def put(self, first_row: int, weight: torch.Tensor) -> None:
        """Quantize rows and write them from `first_row` on. # weight: any float [rows, num_columns], on any device"""
        for start in range(0, len(weight), _ROWS_AT_ONCE):  # so the float32 rows need no large temporary
            some = weight[start : start + _ROWS_AT_ONCE].to(self.device)
            place = slice(first_row + start, first_row + start + len(some))
            self.codes[place], self.scales[place] = quantized(some)

    def slot(self, first_row: int, num_rows: int) -> Fp8Slot:
        return Fp8Slot(self, first_row, num_rows)

    def dequantized(self) -> torch.Tensor:
        """# -> self.dtype [num_rows, num_columns]"""
        return dequantized(self.codes, self.scales, self.dtype)

    def products(self, codes: torch.Tensor) -> torch.Tensor:
        """Sums of products of codes, without the scales. # e4m3 [T, num_columns] -> float32 [T, num_rows]"""
        one, whole = self._one, ScalingType.TensorWise
        return F.scaled_mm(codes, self.codes.t(), one, whole, one, whole, output_dtype=torch.float32)


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows of any float. # [..., D] -> e4m3 [..., D], float32 [...]"""
    wide = rows.float()
    largest = wide.abs().amax(-1).clamp_(min=SMALLEST_MAXIMUM)
    codes = (wide * (LARGEST_CODE / largest)[..., None]).clamp_(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    return codes, largest / LARGEST_CODE


def scaled(
    products: torch.Tensor, token_scales: torch.Tensor, row_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Products of codes as products of values, plus `bias` [out]. # float32 [T, out], [T], [out] -> float32 [T, out]"""
    values = products * (row_scales * token_scales[:, None])
    return values if bias is None else values + bias.float()


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes.float() * scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Slot:
    """A run of a matrix's rows, which one tensor of a checkpoint fills."""

    matrix: Fp8Matrix
    first_row: int
    num_rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.matrix.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def put(self, weight: torch.Tensor) -> None:
        assert weight.shape == self.shape, "the loader must compare shapes first"
        self.matrix.put(self.first_row, weight)

    def put_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """# e4m3 [num_rows, num_columns], float32 [num_rows]"""
        assert codes.shape == self.shape, "the loader must compare shapes first"
        rows = slice(self.first_row, self.first_row + self.num_rows)
        self.matrix.codes[rows], self.matrix.scales[rows] = codes, scales
