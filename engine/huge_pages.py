"""Memory for matrices that every step reads whole, in huge pages: in small ones, every 4 KB would be a TLB miss."""

from __future__ import annotations

import contextlib
import mmap

import torch

_SLAB_BYTES = 32 << 20


class HugePages:
    """Gives out memory, one piece behind the other."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """# uint8 [num_bytes], zeros, on a cache line of its own; it lives as long as somebody holds it"""
        if num_bytes > len(self._slab):
            mapping = mmap.mmap(-1, max(num_bytes, _SLAB_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages keeps small ones
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self._slab = torch.frombuffer(mapping, dtype=torch.uint8)
        taken, self._slab = self._slab[:num_bytes], self._slab[-(-num_bytes // 64) * 64 :]
        return taken
