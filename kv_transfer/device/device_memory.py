"""The interface to a pool in the memory of a device. The transport reads and registers the pool itself.

`engine/gpu/device_memory.py` implements it for CUDA. A call that fails raises `TransportError`. If all later calls
would fail as well, it raises `DeviceLost`, which ends the agent and the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


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

    # Of the tier below the pool. One thread at a time calls `copy_out`, and one `copy_in`, beside the agent.

    def host_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that the device copies to and from at its full speed."""
        ...

    def copy_out(self, block: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy a block to the host, beside the steps. `target`: uint8 [block_bytes]. Waits for the end of the copy."""
        ...

    def copy_in(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Likewise into a block of the pool."""
        ...
