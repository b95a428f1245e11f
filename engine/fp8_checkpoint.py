"""Checkpoints whose matrices are e4m3 codes, as Hugging Face publishes them: each with a tensor of scales beside it.

    X.weight  X.weight_scale        one scale, or one for each row     quant_method fp8, compressed-tensors
    X.weight  X.weight_scale_inv    one for each block of the matrix   quant_method fp8 with weight_block_size

A weight is its code times its scale in all of them. Scales of inputs are left out, because a product here scales the
inputs of each token by their own largest value.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from core.errors import ConfigError

SCALES = re.compile(r".*\.(weight_scale|weight_scale_inv|input_scale|output_scale|k_scale|v_scale)$")


class Fp8Checkpoint:
    """`find` returns a tensor of the checkpoint by its name, None if it has none."""

    def __init__(self, find: Callable[[str], torch.Tensor | None], block_size: tuple[int, int] | None) -> None:
        self._find = find
        self._block_size = block_size

    @property
    def has_blocks(self) -> bool:
        """Whether blocks of a matrix have scales of their own."""
        return self._block_size is not None

    def row_scales(self, name: str, codes: torch.Tensor) -> torch.Tensor | None:
        """None if rows have more than one scale. # -> float32 [rows]"""
        scales = self._scales(name)
        if scales.numel() not in (1, len(codes)) or self.has_blocks:
            return None
        return scales.flatten().expand(len(codes))

    def dequantized(self, name: str, codes: torch.Tensor) -> torch.Tensor:
        """# e4m3 [rows, columns] -> float32"""
        if codes.ndim != 2:
            raise ConfigError(f"{name} is of 8 bits and has {codes.ndim} dimensions, must have 2")
        by_row = self.row_scales(name, codes)
        if by_row is not None:
            return codes.float() * by_row[:, None]
        scales, block = self._scales(name), self._block_size
        blocks = None if block is None else tuple(-(-size // of) for size, of in zip(codes.shape, block, strict=True))
        if block is None or tuple(scales.shape) != blocks:
            raise ConfigError(f"{name} has scales of shape {list(scales.shape)}, which do not fit {list(codes.shape)}")
        (num_rows, num_columns), scales = codes.shape, scales.repeat_interleave(min(block[0], len(codes)), 0)
        scales = scales.repeat_interleave(min(block[1], num_columns), 1)
        return codes.float() * scales[:num_rows, :num_columns]

    def _scales(self, name: str) -> torch.Tensor:
        for ending in ("_scale", "_scale_inv"):
            found = self._find(name + ending)
            if found is not None:
                return found.float()
        raise ConfigError(f"{name} is of 8 bits, and the checkpoint has no {name}_scale")
