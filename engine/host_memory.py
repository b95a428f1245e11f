"""Host memory: huge pages for matrices, and freed memory that malloc keeps.

Every step reads whole matrices. With small pages, every 4 KB would cost a TLB miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_SLAB_BYTES = 32 << 20


class HugePages:
    """Allocates consecutive pieces of memory from huge pages."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """# uint8 [num_bytes], zeros, aligned to a cache line; the memory lives as long as a tensor refers to it"""
        if num_bytes > len(self._slab):
            mapping = mmap.mmap(-1, max(num_bytes, _SLAB_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # Linux without huge pages uses small pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self._slab = torch.frombuffer(mapping, dtype=torch.uint8)
        taken, self._slab = self._slab[:num_bytes], self._slab[-(-num_bytes // 64) * 64 :]
        return taken


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the whole process. Returns False if the C library has no such setting.

    A step allocates and frees a few tens of MB. Outside the main thread, glibc returns much of this memory to the
    system each time, and the next layer faults the pages in again: a prefill of 1,900 tokens had 43,000 page faults,
    6 % of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, _KEPT_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
