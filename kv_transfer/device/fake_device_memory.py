"""FakeDeviceMemory: host memory that behaves like the memory of a device, for tests and for the CPU."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kv_transfer.protocol.digests import of_blocks


class FakeDeviceMemory:
    def __init__(self, num_bytes: int, device: int = 0, uuid: str = "", copy_bytes_per_s: float = 0.0) -> None:
        self.device = device
        self.uuid = uuid
        self.copy_bytes_per_s = copy_bytes_per_s
        self.bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def enter(self) -> None:
        """Every thread reaches host memory."""

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        return of_blocks(memoryview(self.bytes.data), blocks, block_bytes)
