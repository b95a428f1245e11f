"""GGUF's simplest blocks dequantized by a C kernel, straight into a slot of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.cpu.kernels import Kernels

if TYPE_CHECKING:
    import numpy as np

BLOCK = 32
KINDS = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2}  # as in gguf_blocks.c
DTYPES = (torch.bfloat16, torch.float32)


def dequantize_into(kernels: Kernels, slot: torch.Tensor, kind: str, raw: np.ndarray) -> bool:
    """Whether there is a kernel for this; then the slot is filled.

    raw: uint8 [rows, bytes of a row], as it lies in the file; slot: [rows, columns]
    """
    if kind not in KINDS or slot.dtype not in DTYPES or slot.device.type != "cpu" or not slot.is_contiguous():
        return False
    assert slot.numel() % BLOCK == 0, "blocks are whole"
    raw = raw if raw.flags.c_contiguous else raw.copy()
    is_bf16 = slot.dtype is torch.bfloat16
    kernels.dequantize(raw.ctypes.data, slot.numel() // BLOCK, KINDS[kind], slot.data_ptr(), is_bf16)
    return True
