"""The interface to a pool in the memory of a device. The transport reads and registers the pool itself.

`engine/gpu/device_memory.py` implements it for CUDA. A call that fails raises `TransportError`. If all later calls
would fail as well, it raises `DeviceLost`, which ends the agent and the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DeviceMemory(Protocol):
    device: int  # the CUDA device of the pool
    uuid: str  # of the GPU; equal for two pools if and only if they share it; empty = not known
    copy_bytes_per_s: float  # of a copy from the device to itself, measured at start

    def enter(self) -> None:
        """Make the device the current one of this thread."""
        ...

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        """XXH3_64 of each block of the pool (kv_transfer/protocol/digests.py). Waits for the result."""
        ...
