"""The interface to a pool in the memory of a device: copies between addresses, digests, and maps of peers' pools.

`engine/gpu/device_memory.py` implements it for CUDA. Only the agent's thread calls it. A call that fails raises
`TransportError`. If all later calls would fail as well, it raises `DeviceLost`, which ends the agent and the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

# int64 [copies, 3], or its rows: address of the source, address of the target, bytes. The device can reach both: its
# own memory and mapped pools of peers.
Copies = npt.NDArray[np.int64] | Sequence[tuple[int, int, int]]


class DeviceMemory(Protocol):
    device: int  # the CUDA device of the pool
    uuid: str  # of the GPU; equal for two pools if and only if they share it; empty = not known
    copy_bytes_per_s: float  # of a copy from the device to itself, measured at start

    def export(self) -> bytes:
        """A handle of the pool, for `map` in another process of this machine."""
        ...

    def map(self, handle: bytes) -> int:
        """Map a peer's pool. Returns the address of its block 0 here."""
        ...

    def unmap(self, address: int) -> None:
        """No copy from the peer's pool may be in flight."""
        ...

    def start_copies(self, copies: Copies) -> int:
        """Start copies, in any order among themselves, behind all copies started before. Returns a handle."""
        ...

    def has_ended(self, handle: int) -> bool:
        """Whether the copies of `start_copies` have ended. True once; never waits."""
        ...

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        """XXH3_64 of each block of the pool (kv_transfer/protocol/digests.py). Waits for the result."""
        ...
