"""Dequantizes GGUF's simplest block types with a C kernel, directly into a slot of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.cpu.kernels import Kernels

if TYPE_CHECKING:
    import numpy as np

BLOCK = 32
KINDS = {"Q8_0": (0, 34), "Q4_0": (1, 18), "Q4_1": (2, 20)}  # number in gguf_blocks.c, bytes of a block
DTYPES = (torch.bfloat16, torch.float32)


def dequantize_into(kernels: Kernels, slot: torch.Tensor, kind: str, raw: np.ndarray) -> bool:
    """Fill the slot if a kernel supports the block type and the slot. Returns whether the slot was filled.

    raw: uint8 [rows, bytes of a row], the bytes of the file; slot: [rows, columns]
    """
    if kind not in KINDS or slot.dtype not in DTYPES or slot.device.type != "cpu" or not slot.is_contiguous():
        return False
    number, block_bytes = KINDS[kind]
    num_blocks = slot.numel() // BLOCK
    assert slot.shape[-1] % BLOCK == 0, "a row's blocks are whole"
    assert raw.nbytes == num_blocks * block_bytes, "the kernel reads every block of the slot"
    raw = raw if raw.flags.c_contiguous else raw.copy()
    kernels.dequantize(raw.ctypes.data, num_blocks, number, slot.data_ptr(), slot.dtype is torch.bfloat16)
    return True
