"""Reads GGUF blocks of 32 weights whose codes equal the codes of our groups, without rounding the weights again.

    Q8_0   [half scale][32 signed bytes]                     weight = byte * scale
    Q4_0   [half scale][16 bytes of two nibbles]             weight = (nibble - 8) * scale
    Q4_1   [half scale][half minimum][16 bytes]              weight = nibble * scale + minimum
    Q4_K   super-blocks of eight such groups; a group's scale and minimum are 6-bit multiples of two common halves

Low nibbles are a block's first 16 weights, high nibbles its last 16; in Q4_K, low and high nibbles are two groups. Only
Q4_K's scales and minimums are rounded (to half precision); every code stays. Other types have no such groups.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.quantization import GroupedRows
from model_files.gguf_file import GGUFFile

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [rows, groups, 32], scales and minimums [rows, groups]


def exact_groups(file: GGUFFile, name: str, bits: int) -> GroupedRows | None:
    """A matrix's codes, scales and minimums; None if the file's type has no groups of `bits`.

    Raises `ConfigError` like `GGUFFile.tensor`.
    """
    kind, raw = file.raw_tensor(name)
    if raw.ndim != 2 or (kind, bits) not in _READERS:
        return None
    block_bytes, read = _READERS[kind, bits]
    codes, scales, minimums = read(raw.reshape(len(raw), -1, block_bytes))
    if not np.isfinite(scales).all() or (minimums is not None and not np.isfinite(minimums).all()):
        return None  # out of half precision's range; the caller quantizes the matrix instead
    return GroupedRows(
        torch.from_numpy(codes.reshape(len(codes), -1)),
        torch.from_numpy(scales),
        None if minimums is None else torch.from_numpy(minimums),
        file.tensors[name].shape[1],
    )


def _halves(blocks: np.ndarray, place: int) -> np.ndarray:
    """The half-precision number at byte `place` of each block. # [rows, blocks, bytes] -> float16 [rows, blocks]"""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate((packed & 0xF, packed >> 4), axis=-1)


def _q8_0(blocks: np.ndarray) -> Parts:
    return blocks[..., 2:] ^ 0x80, _halves(blocks, 0), None  # flipping the sign bit adds 128


def _q4_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[..., 2:]), scales, scales * np.float16(-8)


def _q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(blocks: np.ndarray) -> Parts:
    low, middle, high = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((low & 63, high & 0xF | low >> 6 << 4), axis=-1)
    minimums = np.concatenate((middle & 63, high >> 4 | middle >> 6 << 4), axis=-1)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack((nibbles & 0xF, nibbles >> 4), axis=-2)  # [rows, super-blocks, 4, 2, 32]
    common = [_halves(blocks, place).astype(np.float32)[..., None] for place in (0, 2)]
    with np.errstate(over="ignore"):  # too large a product becomes infinite; `exact_groups` checks for this
        products = [(common[0] * scales).astype(np.float16), (-common[1] * minimums).astype(np.float16)]
    rows = len(blocks)
    return codes.reshape(rows, -1, 32), products[0].reshape(rows, -1), products[1].reshape(rows, -1)


# (GGUF type, bits) -> (bytes of a block, reader)
_READERS: dict[tuple[str, int], tuple[int, Callable[[np.ndarray], Parts]]] = {
    ("Q8_0", 8): (34, _q8_0),
    ("Q4_0", 4): (18, _q4_0),
    ("Q4_1", 4): (20, _q4_1),
    ("Q4_K", 4): (144, _q4_k),
}
