"""CudaDeviceMemory: what the transfer agent needs of the pool's device (the interface:
kv_transfer/device/device_memory.py).

Digests have a stream of their own, and so have copies to the host and copies from the host: they run beside the steps.
No step waits for them and they wait for no step: the agent offers blocks that a collected step has computed, and reads
into blocks that no sequence uses. Likewise the tier below the pool copies registered blocks out, and copies into
reserved ones. A copy engine moves the bytes of a copy, so no program of a step waits for a processor.

On the host everything happens at once, with the same operators: tests run without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from core.errors import DeviceLost, TransportError
from engine.gpu.device_queue import open_queue, upload
from engine.gpu.digests import scratch_shape
from engine.gpu.errors import sort_error
from engine.gpu.ops import ops

_PROBE_BYTES = 256 << 20  # of a measured copy: more than the L2 cache of any GPU holds
_MIN_PROBE_BYTES = 1 << 20
_NUM_PROBES = 5
_MAX_SUMS_BYTES = 32 << 20  # scratch of one launch of digests


class CudaDeviceMemory:
    """Raises `TransportError` where a call fails, and `DeviceLost` where all later calls will: the transfer agent then
    ends, and the worker with it. One thread at a time calls it; `copy_out` and `copy_in` may have one more each."""

    def __init__(self, pool: torch.Tensor, probe_bytes: int = _PROBE_BYTES) -> None:
        """`pool`: [num_blocks, ...], contiguous. Measures the device's copy speed and compiles the kernels."""
        assert pool.is_contiguous(), "a block must be one run of bytes"
        self.device = pool.device.index or 0
        self.uuid = _uuid_of(pool.device)
        self._pool = pool.view(torch.uint8).view(len(pool), -1)
        self._digesting, self._copying_out, self._copying_in = (open_queue(pool.device, True) for _ in range(3))
        with _as_transport_error("measure copies"):
            self.copy_bytes_per_s = self._measure_copies(probe_bytes)
            self.digests([0], self._pool.shape[1])  # compiles the kernels

    def enter(self) -> None:
        with _as_transport_error("enter the device"):
            torch.zeros(1, device=self._pool.device)  # the first call of a thread makes the device's context current

    def digests(self, blocks: Sequence[int], block_bytes: int) -> tuple[int, ...]:
        memory = self._rows(block_bytes)
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

    def host_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        pinned = self._pool.device.type == "cuda"
        with _as_transport_error("lock a buffer"):
            buffer: npt.NDArray[np.uint8] = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        return buffer

    def copy_out(self, block: int, target: npt.NDArray[np.uint8]) -> None:
        with _as_transport_error("copy a block out"), self._copying_out.computing():
            torch.from_numpy(target).copy_(self._rows(len(target))[block], non_blocking=True)
            self._copying_out.mark().wait()

    def copy_in(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        with _as_transport_error("copy a block in"), torch.inference_mode(), self._copying_in.computing():
            self._rows(len(content))[block].copy_(torch.from_numpy(content), non_blocking=True)
            self._copying_in.mark().wait()

    # ---- inside

    def _rows(self, block_bytes: int) -> torch.Tensor:
        """# uint8 [num_blocks, block_bytes]"""
        return self._pool.view(-1)[: self._pool.numel() // block_bytes * block_bytes].view(-1, block_bytes)

    def _measure_copies(self, probe_bytes: int) -> float:
        """Bytes per second of the fastest of some copies inside the device, by the driver."""
        with self._digesting.computing():
            source, target = self._allocate_probes(probe_bytes)
            target.copy_(source)
            seconds = []
            for _ in range(_NUM_PROBES):
                started = self._digesting.mark()
                target.copy_(source)
                ended = self._digesting.mark()
                ended.wait()
                seconds.append(ended.seconds_since(started))
            num_bytes = source.numel()
        del source, target
        self._digesting.free_cached()
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


def _uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextlib.contextmanager
def _as_transport_error(action: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's error of a device is one
        found = sort_error(error)
        raise found if isinstance(found, DeviceLost) else TransportError(f"{action}: {error}") from error
