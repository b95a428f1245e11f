"""The pinned host memory of one agent, in equal slots: one half for readers of our pool, one half for our own reads.

With common slots, two agents that read from each other could deadlock: the reads of each agent would fill its own
slots, and neither agent would have a slot for the other's reads.
"""

from __future__ import annotations

import ctypes
from collections import deque
from mmap import PAGESIZE, mmap

from core.kv_layout import KVLayout
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.transports.transport import PoolMemory

SLOTS_PER_HALF = 8
_ROW_BYTES = KVLayout("staging", "float32", 1, 1, 16, 1).block_bytes


def slot_layout(slot_bytes: int) -> KVLayout:
    """A layout with blocks of the size of a slot: a transport registers pools of blocks."""
    return KVLayout("staging", "float32", 1, 1, 16, slot_bytes // _ROW_BYTES)


class StagingRing:
    def __init__(self, memory: DeviceMemory | None, num_bytes: int) -> None:
        """`memory` allocates pinned memory; None: plain host memory."""
        self.slot_bytes = max(PAGESIZE, num_bytes // (2 * SLOTS_PER_HALF) // PAGESIZE * PAGESIZE)
        self.num_slots = 2 * SLOTS_PER_HALF
        size = self.slot_bytes * self.num_slots
        if memory is None:
            self.view = memoryview(mmap(-1, size))
            self.base = address_of_view(self.view)
        else:
            self.base, self.view = memory.pinned(size)
        self.for_readers = deque(range(SLOTS_PER_HALF))  # free
        self.for_reads = deque(range(SLOTS_PER_HALF, self.num_slots))  # free

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def as_pool(self) -> PoolMemory:
        return PoolMemory(self.base, self.num_slots, slot_layout(self.slot_bytes), self.view)


def address_of_view(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
