"""FakeDeviceMemory: host memory that behaves like the memory of a device, for tests and for the CPU.

The pool is a file in memory, so that other processes can map it. Copies run in order, as on a stream, each at a later
poll than its start. A copy that touches memory out of the device's reach raises `TransportError`, and so does
`unmap` of a pool while a copy from the pool is in flight.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import TransportError
from kv_transfer.device.device_memory import Copies
from kv_transfer.protocol.digests import of_blocks


@dataclass(slots=True)
class _Batch:
    handle: int
    copies: list[tuple[int, int, int]]  # source, target, bytes
    polls_left: int


class FakeDeviceMemory:
    def __init__(
        self, num_bytes: int, device: int = 0, uuid: str = "", copy_bytes_per_s: float = 0.0, polls_per_copy: int = 1
    ) -> None:
        """`polls_per_copy`: the calls of `has_ended` that answer no before a copy takes place."""
        self.device = device
        self.uuid = uuid
        self.copy_bytes_per_s = copy_bytes_per_s
        self.polls_per_copy = polls_per_copy
        self.failures: deque[TransportError] = deque()  # raised by the next calls of `map` and `start_copies`
        self.num_batches = 0
        self._file = os.memfd_create("fake-device-memory")
        os.ftruncate(self._file, num_bytes)
        self._regions: dict[int, np.ndarray] = {}  # reachable memory, by its address
        self._mapped: set[int] = set()
        self.bytes = self._region(mmap.mmap(self._file, num_bytes))
        self._in_flight: deque[_Batch] = deque()
        self._ended: set[int] = set()

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def export(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def map(self, handle: bytes) -> int:
        self._fail()
        try:
            file = os.open(handle, os.O_RDWR)
        except OSError as error:
            raise TransportError(f"map a peer's pool: {error}") from error
        try:
            array = self._region(mmap.mmap(file, 0))
        finally:
            os.close(file)
        self._mapped.add(int(array.ctypes.data))
        return int(array.ctypes.data)

    def unmap(self, address: int) -> None:
        first, end = address, address + self._regions[address].nbytes
        for batch in self._in_flight:
            if any(source < end and source + num_bytes > first for source, _, num_bytes in batch.copies):
                raise TransportError("a copy from the pool is in flight")
        self._mapped.remove(address)
        del self._regions[address]

    def start_copies(self, copies: Copies) -> int:
        self._fail()
        rows = [(int(source), int(target), int(num_bytes)) for source, target, num_bytes in copies]
        for source, target, num_bytes in rows:
            self._check(source, num_bytes)
            self._check(target, num_bytes)
        self.num_batches += 1
        self._in_flight.append(_Batch(self.num_batches, rows, self.polls_per_copy))
        return self.num_batches

    def has_ended(self, handle: int) -> bool:
        if handle not in self._ended:
            self._progress()
        if handle not in self._ended:
            assert any(batch.handle == handle for batch in self._in_flight), f"{handle} was reported already"
            return False
        self._ended.remove(handle)
        return True

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        return of_blocks(memoryview(self.bytes.data), blocks, block_bytes)

    def close(self) -> None:
        """Close our file. Peers that have mapped the pool keep their maps."""
        os.close(self._file)

    # ---- inside

    def _region(self, memory: mmap.mmap) -> np.ndarray:
        array = np.frombuffer(memory, np.uint8)
        self._regions[int(array.ctypes.data)] = array
        return array

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.popleft()

    def _check(self, address: int, num_bytes: int) -> None:
        if not any(at <= address and address + num_bytes <= at + a.nbytes for at, a in self._regions.items()):
            raise TransportError(f"the device cannot reach {num_bytes} bytes at {address:#x}")

    def _progress(self) -> None:
        """One poll of the oldest batch."""
        oldest = self._in_flight[0]
        oldest.polls_left -= 1
        if oldest.polls_left < 0:
            for source, target, num_bytes in oldest.copies:
                ctypes.memmove(target, source, num_bytes)
            self._in_flight.popleft()
            self._ended.add(oldest.handle)
