"""Weights of 8 bits in floating point (e4m3): one scale for each row of a matrix.

    weight = code * scale        codes -448 to 448, 3 bits of mantissa; scale = the row's largest weight / 448

Products take inputs as they are: only the weights are rounded. The embedding and the head stay in the dtype of the
model, because their rounding errors do most harm. `engine/quantization.py` has the integer formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = "fp8"  # the name of the option
CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
_ROWS_AT_ONCE = 4096


class Fp8Matrix:
    """A quantized matrix [num_rows, num_columns]. `put` writes each row once, in any order."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype  # of dequantized rows
        self.codes = torch.empty(num_rows, num_columns, dtype=CODES, device=device)
        self.scales = torch.empty(num_rows, dtype=torch.float32, device=device)

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
            some = weight[start : start + _ROWS_AT_ONCE].to(self.device).float()
            scales = some.abs().amax(-1) / LARGEST_CODE
            inverse = torch.where(scales > 0, 1 / scales, 0.0)
            place = slice(first_row + start, first_row + start + len(some))
            self.codes[place] = (some * inverse[:, None]).clamp_(-LARGEST_CODE, LARGEST_CODE).to(CODES)
            self.scales[place] = scales

    def slot(self, first_row: int, num_rows: int) -> Fp8Slot:
        return Fp8Slot(self, first_row, num_rows)

    def dequantized(self) -> torch.Tensor:
        """# -> self.dtype [num_rows, num_columns]"""
        return dequantized(self.codes, self.scales, self.dtype)


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
