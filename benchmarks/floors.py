"""What the core could do at best: how fast it reads memory, and how fast it multiplies matrices.

A decode step cannot take less than it takes to read the weights and the batch's KV once; a prompt cannot take less than
its multiplications at this speed. Both are the best of a few tries, on the thread that calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from pathlib import Path

import torch

READ_BYTES = 1 << 29  # far more than any cache
MATRIX = 2048
TRIES = 5


def read_bytes_per_s() -> float:
    """The C library's search for a byte that is not there: it reads, and does nothing else."""
    memory = mmap.mmap(-1, READ_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.zero_()
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    best = 0.0
    for _ in range(TRIES):
        begun = time.perf_counter()
        found = search(tensor.data_ptr(), 1, READ_BYTES)
        best = max(best, READ_BYTES / (time.perf_counter() - begun))
        assert found is None
    return best


def flop_per_s(dtype: torch.dtype = torch.bfloat16) -> float:
    """A product of two square matrices through torch, whose library knows the CPU's own instructions for it."""
    left, right = torch.randn(MATRIX, MATRIX, dtype=dtype), torch.randn(MATRIX, MATRIX, dtype=dtype)
    best = 0.0
    for _ in range(TRIES):
        begun = time.perf_counter()
        torch.matmul(left, right)
        best = max(best, 2 * MATRIX**3 / (time.perf_counter() - begun))
    return best


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE
