"""CudaDeviceMemory on the host with the kernels under the interpreter, as a device would run them."""

from __future__ import annotations

import torch
import xxhash

from engine.gpu.cuda_driver import Allocation
from engine.gpu.device_memory import CudaDeviceMemory


class _NoDriver:
    """Exports only: the pool is mapped in the process that exports it."""

    def enter(self, device: int) -> None: ...

    def allocation_of(self, address: int) -> Allocation:
        return Allocation(address, 0)

    def export(self, base: int) -> bytes:
        return base.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        raise AssertionError(handle)

    def close(self, base: int) -> None:
        raise AssertionError(base)


def test_shuffled_blocks_of_a_peer_arrive_with_their_digests() -> None:
    theirs, ours = torch.randn(8, 3, 2, 2, 16, 24).half(), torch.randn(8, 3, 2, 2, 16, 24).half()
    block_bytes = ours[0].nbytes
    peer = CudaDeviceMemory(theirs, _NoDriver(), probe_bytes=1 << 16)
    memory = CudaDeviceMemory(ours, _NoDriver(), probe_bytes=1 << 16)
    expected = ours.clone()
    expected[[6, 1, 4]] = theirs[[0, 7, 3]]

    base = memory.map(peer.export())
    handle = memory.start_copies(
        [
            (base + source * block_bytes, ours.data_ptr() + target * block_bytes, block_bytes)
            for source, target in ((0, 6), (7, 1), (3, 4))
        ]
    )

    assert memory.has_ended(handle)
    assert torch.equal(ours, expected)
    assert memory.digests([6, 1, 4], block_bytes) == peer.digests([0, 7, 3], block_bytes)
    assert memory.digests([2], block_bytes) == (xxhash.xxh3_64_intdigest(ours[2].numpy().tobytes()),)
