"""FakeDeviceMemory: host memory that behaves like the memory of a device, for tests and for the CPU."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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

    def host_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def copy_out(self, block: int, target: npt.NDArray[np.uint8]) -> None:
        target[:] = self.bytes[block * len(target) : (block + 1) * len(target)]

    def copy_in(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        self.bytes[block * len(content) : (block + 1) * len(content)] = content
