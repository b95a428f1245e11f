"""The KV pool's memory: allocated once, page-aligned, touched ahead of use, never moved.

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

Transfers need this order in memory: one block is one run of bytes. A pool of 8 bits has a second tensor with a scale
for each row of this shape. Both tensors are strided views of the same memory, because the scales of a block lie behind
its values (core/kv_layout.py).

Startup touches the first blocks, because the block pool hands these out first. A thread touches the other blocks after
startup (`engine/first_touch.py`). On a CPU the pool is anonymous mapped memory, which torch, numpy and transports use
without a copy. The mapping is private: Linux gives huge pages to shared mappings only under a system-wide setting, and
process_vm_readv reads small pages at less than half the speed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

from core.errors import ConfigError
from core.kv_layout import FLOAT8, SCALE_BYTES, KVLayout
from engine.first_touch import touch_first, touch_in_background

MIN_BLOCKS = 4
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    FLOAT8: torch.float8_e4m3fn,
}


def num_blocks_within(layout: KVLayout, kv_memory_mb: int) -> int:
    """The number of blocks in `kv_memory_mb`. Raises `ConfigError` if there are fewer than MIN_BLOCKS."""
    num_blocks = (kv_memory_mb << 20) // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        needed_mb = -(-MIN_BLOCKS * layout.block_bytes >> 20)
        raise ConfigError(
            f"kv_memory_mb = {kv_memory_mb} holds {num_blocks} KV blocks of {layout.block_bytes} bytes: "
            f"set it to {needed_mb} or more"
        )
    return num_blocks


class KVPool:
    """The pool as tensors and as bytes. Raises `ConfigError` if the allocation fails.

    The padding blocks lie behind the pool's last block. The tensors hold them, and `memory` does not.
    """

    tensor: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    scales: torch.Tensor | None  # float32 [num_blocks, num_layers, 2, num_kv_heads, block_size]; None: no scales

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, num_padding_blocks: int = 0) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_all = num_blocks + num_padding_blocks
        num_bytes = num_all * layout.block_bytes
        self._mapping: mmap.mmap | None = None
        self._untouched = torch.empty(0, dtype=torch.uint8)
        try:
            if device.type == "cpu":
                self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    # A block's part of a layer is a separate run of a few KB. With small pages, each run is a TLB miss.
                    with contextlib.suppress(OSError):  # Linux without huge pages uses small pages
                        self._mapping.madvise(mmap.MADV_HUGEPAGE)
                self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
                self._untouched = touch_first(self._bytes)
            else:
                self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no memory for a KV pool of {num_bytes >> 20} MB: lower kv_memory_mb ({error})"
            ) from error
        self.tensor, self.scales = _views(self._bytes, layout)

    def touch_rest(self) -> threading.Thread | None:
        """Start a thread that touches the other blocks. Returns the thread, or None if no block is left.

        Call once, after the model is loaded: loading maps memory, and mapping and touching block each other.
        """
        untouched, self._untouched = self._untouched, torch.empty(0, dtype=torch.uint8)
        return touch_in_background(untouched) if len(untouched) else None

    def address(self) -> int:
        return self.tensor.data_ptr()

    def blocks(self) -> torch.Tensor:
        """The pool's bytes by block, scales included. # uint8 [num_blocks, block_bytes]"""
        return self._bytes.view(-1, self.layout.block_bytes)[: self.num_blocks]

    def memory(self) -> memoryview | None:
        """The pool's bytes, or None for a pool on a device: only a transport reads device memory."""
        if self._mapping is None:
            return None
        return memoryview(self._mapping)[: self.num_blocks * self.layout.block_bytes]


def _views(memory: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values and the scales of a pool. # memory: uint8 [bytes of all blocks]"""
    num_blocks, shape = len(memory) // layout.block_bytes, layout.block_shape
    values = memory.view(TORCH_DTYPES[layout.dtype]).view(num_blocks, -1)[:, : math.prod(shape)]
    if not layout.has_scales:
        return values.view(num_blocks, *shape), None
    scales = memory.view(torch.float32).view(num_blocks, -1)[:, layout.values_bytes // SCALE_BYTES :]
    return values.unflatten(1, shape), scales.unflatten(1, shape[:-1])
