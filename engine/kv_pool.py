"""The KV pool's memory: allocated once, page-aligned, touched ahead, never moved.

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

The first blocks are touched at start, since they are given out first, and the others by a thread once the worker
is there (`engine/first_touch.py`). On a CPU the pool is anonymous mapped memory, which torch, numpy and transports see
without a copy. It is private: the kernel gives huge pages to shared mappings only where it was told to for all of them,
and another process reads small pages by process_vm_readv at less than half the speed.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

from core.errors import ConfigError
from core.kv_layout import KVLayout
from engine.first_touch import touch, touch_meanwhile

MIN_BLOCKS = 4
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def num_blocks_within(layout: KVLayout, kv_memory_mb: int) -> int:
    """How many blocks `kv_memory_mb` holds. Raises `ConfigError` where they would not serve even a short request."""
    num_blocks = (kv_memory_mb << 20) // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        needed_mb = -(-MIN_BLOCKS * layout.block_bytes >> 20)
        raise ConfigError(
            f"kv_memory_mb = {kv_memory_mb} holds {num_blocks} KV blocks of {layout.block_bytes} bytes: "
            f"set it to {needed_mb} or more"
        )
    return num_blocks


class KVPool:
    """The tensor and its bytes. Raises `ConfigError` where the memory is not there."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        dtype, shape = TORCH_DTYPES[layout.dtype], (num_blocks, *layout.block_shape)
        num_bytes = num_blocks * layout.block_bytes
        self._mapping: mmap.mmap | None = None
        self._untouched = torch.empty(0, dtype=torch.uint8)
        try:
            if device.type == "cpu":
                self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    # A layer of a block is a few KB in a run of its own: with small pages each is a miss of the TLB.
                    with contextlib.suppress(OSError):  # a kernel without huge pages keeps small ones
                        self._mapping.madvise(mmap.MADV_HUGEPAGE)
                self.tensor = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
                self._untouched = touch(torch.frombuffer(self._mapping, dtype=torch.uint8))
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no memory for a KV pool of {num_bytes >> 20} MB: lower kv_memory_mb ({error})"
            ) from error

    def touch_rest(self) -> threading.Thread | None:
        """Have the other blocks touched, by a thread that may be waited for; None where all are. To be called once.

        Later is better: who maps memory, as a model does that is loaded, and the thread would wait for each other.
        """
        untouched, self._untouched = self._untouched, torch.empty(0, dtype=torch.uint8)
        return touch_meanwhile(untouched) if len(untouched) else None

    def address(self) -> int:
        return self.tensor.data_ptr()

    def memory(self) -> memoryview | None:
        """None where the pool lies on a device: only a transport reaches its bytes."""
        return None if self._mapping is None else memoryview(self._mapping)
