"""CudaDeviceMemory: the pool's memory as the transfer agent uses it (the interface:
kv_transfer/device/device_memory.py).

    export --handle--> map in a peer's process --address--> start_copies --handle--> has_ended

Copies and digests have streams of their own, so they run beside the steps. No step waits for them and they wait for no
step: the agent offers blocks that a collected step has computed, and reads into blocks that no sequence uses.

On the host everything happens at once, with the same operators: tests run without a GPU.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from core.errors import DeviceLost, TransportError
from engine.gpu.copies import runs_by_access
from engine.gpu.cuda_driver import IPC_HANDLE_BYTES, Allocation, load_driver
from engine.gpu.device_queue import Mark, open_queue, upload
from engine.gpu.digests import scratch_shape
from engine.gpu.errors import sort_error
from engine.gpu.ops import ops

_PROBE_BYTES = 256 << 20  # of a measured copy: more than the L2 cache of any GPU holds
_MIN_PROBE_BYTES = 1 << 20
_NUM_PROBES = 5
_MAX_SUMS_BYTES = 32 << 20  # scratch of one launch of digests

# Magic, the exporting process, offset of the pool in its allocation, the driver's handle of the allocation.
_HANDLE = struct.Struct(f"<4s16sQ{IPC_HANDLE_BYTES}s")
_MAGIC = b"cu01"
_THIS_PROCESS = uuid.uuid4().bytes  # two containers may have equal process ids
_exported: dict[bytes, int] = {}  # addresses of this process's pools, by handle: the driver maps no own allocation


class IpcDriver(Protocol):
    """`CudaDriver`."""

    def enter(self, device: int) -> None: ...
    def allocation_of(self, address: int) -> Allocation: ...
    def export(self, base: int) -> bytes: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, base: int) -> None: ...


class CudaDeviceMemory:
    """Raises `TransportError` where a call fails, and `DeviceLost` where all later calls will: the transfer agent then
    ends, and the worker with it. One thread at a time calls it."""

    def __init__(self, pool: torch.Tensor, driver: IpcDriver | None = None, probe_bytes: int = _PROBE_BYTES) -> None:
        """`pool`: [num_blocks, ...], contiguous. Measures the device's copy speed and compiles the kernels."""
        assert pool.is_contiguous(), "a block must be one run of bytes"
        self.device = pool.device.index or 0
        self.uuid = _uuid_of(pool.device)
        self._pool = pool.view(torch.uint8).view(len(pool), -1)
        self._driver = driver
        self._copying = open_queue(pool.device, background=True)
        self._digesting = open_queue(pool.device, background=True)
        self._in_flight: dict[int, Mark] = {}
        self._last_handle = 0
        self._mapped: dict[int, list[int]] = {}  # bases of a mapped allocation, one a map, by the pool's address
        with _as_transport_error("measure copies"):
            self.copy_bytes_per_s = self._measure_copies(probe_bytes)
            self._warm_up()

    def export(self) -> bytes:
        driver, address = self._enter_driver(), self._pool.data_ptr()
        base = driver.allocation_of(address).base
        try:
            handle = driver.export(base)
        except TransportError as error:
            raise TransportError(
                f"other processes cannot map the KV pool: {error}. They cannot map torch's expandable_segments: "
                "remove this from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
            ) from error
        exported = _HANDLE.pack(_MAGIC, _THIS_PROCESS, address - base, handle)
        _exported[exported] = address
        return exported

    def map(self, handle: bytes) -> int:
        if len(handle) != _HANDLE.size or not handle.startswith(_MAGIC):
            raise TransportError(f"a peer's map handle of {len(handle)} bytes is not of this version")
        _, process, offset, opened = _HANDLE.unpack(handle)
        if process == _THIS_PROCESS:
            return _exported[handle]
        base = self._enter_driver().open(opened)
        self._mapped.setdefault(base + offset, []).append(base)
        return int(base + offset)

    def unmap(self, address: int) -> None:
        bases = self._mapped.get(address)
        if bases:
            self._enter_driver().close(bases.pop())

    def start_copies(self, copies: npt.ArrayLike) -> int:
        with _as_transport_error("start copies"), self._copying.computing():
            for access_bytes, runs in runs_by_access(copies).items():
                ops.copy_runs(upload(runs.table, self._pool.device), runs.num_pieces, access_bytes)
            mark = self._copying.mark()
        self._last_handle += 1
        self._in_flight[self._last_handle] = mark
        return self._last_handle

    def has_ended(self, handle: int) -> bool:
        with _as_transport_error("copy"):
            ended = self._in_flight[handle].has_ended()
        if ended:
            del self._in_flight[handle]
        return ended

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        memory = self._pool.view(-1)[: self._pool.numel() // block_bytes * block_bytes].view(-1, block_bytes)
        num_chunks = scratch_shape(1, block_bytes)[1]
        batch = max(_MAX_SUMS_BYTES // (num_chunks * 64), 1)
        found: list[int] = []
        with _as_transport_error("digests"), self._digesting.computing():
            for first in range(0, len(blocks), batch):
                ids = upload(np.array(blocks[first : first + batch], np.int32), self._pool.device)
                sums = torch.empty(scratch_shape(len(ids), block_bytes), dtype=torch.int64, device=ids.device)
                digests = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
                ops.block_digests(memory, ids, sums, digests)
                found += digests.cpu().numpy().view(np.uint64).tolist()
        return tuple(found)

    # ---- inside

    def _enter_driver(self) -> IpcDriver:
        if self._driver is None:
            self._driver = load_driver()
        self._driver.enter(self.device)
        return self._driver

    def _measure_copies(self, probe_bytes: int) -> float:
        """Bytes per second of the fastest of some copies inside the device, by the driver."""
        with self._copying.computing():
            source, target = self._allocate_probes(probe_bytes)
            target.copy_(source)
            seconds = []
            for _ in range(_NUM_PROBES):
                started = self._copying.mark()
                target.copy_(source)
                ended = self._copying.mark()
                ended.wait()
                seconds.append(ended.seconds_since(started))
            num_bytes = source.numel()
        del source, target
        self._copying.free_cached()
        return num_bytes / max(min(seconds), 1e-9)

    def _allocate_probes(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers, smaller where the device has less left."""
        while True:
            try:
                source = torch.ones(num_bytes, dtype=torch.uint8, device=self._pool.device)
                return source, torch.empty_like(source)
            except torch.OutOfMemoryError:
                if num_bytes <= _MIN_PROBE_BYTES:
                    raise
                num_bytes //= 2

    def _warm_up(self) -> None:
        """Launch each kernel once: Triton compiles a kernel at its first launch."""
        block_bytes = self._pool.shape[1]
        self.digests([0], block_bytes)
        buffer = torch.zeros(2, 16, dtype=torch.uint8, device=self._pool.device)
        handle = self.start_copies([(buffer[0].data_ptr(), buffer[1].data_ptr(), 16)])
        self._in_flight.pop(handle).wait()


def _uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextlib.contextmanager
def _as_transport_error(action: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's error of a device is one
        found = sort_error(error)
        raise found if isinstance(found, DeviceLost) else TransportError(f"{action}: {error}") from error
