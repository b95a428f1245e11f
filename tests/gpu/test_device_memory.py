"""CudaDeviceMemory between two processes on one GPU. benchmarks/gpu.py measures it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
import xxhash

from engine.gpu.device_memory import CudaDeviceMemory

pytestmark = pytest.mark.gpu

SHAPE = (64, 4, 2, 2, 16, 64)


@pytest.fixture(autouse=True)
def _need_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _own_pool(pipe: Connection) -> None:
    """The peer: exports its pool, and lives until the pipe closes."""
    pool = _noise(1).cuda()
    torch.cuda.synchronize()
    pipe.send_bytes(CudaDeviceMemory(pool).export())
    pipe.poll(None)


def _wait(memory: CudaDeviceMemory, handle: int) -> None:
    torch.cuda.synchronize()
    assert memory.has_ended(handle)


def test_blocks_of_another_process_arrive() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_own_pool, args=(theirs,), daemon=True)
    peer.start()
    try:
        assert ours.poll(120), "the peer did not export its pool"
        pool = _noise(2).cuda()
        memory, block_bytes = CudaDeviceMemory(pool), pool[0].nbytes
        base = memory.map(ours.recv_bytes())
        pairs = list(zip(torch.randperm(64)[:40].tolist(), torch.randperm(64)[:40].tolist(), strict=True))

        handle = memory.start_copies(
            [(base + s * block_bytes, pool.data_ptr() + t * block_bytes, block_bytes) for s, t in pairs]
        )
        _wait(memory, handle)
        memory.unmap(base)

        expected, source = _noise(2), _noise(1)
        for source_block, target_block in pairs:
            expected[target_block] = source[source_block]
        assert torch.equal(pool.cpu(), expected)
    finally:
        ours.close()
        peer.terminate()
        peer.join()


def test_digests_are_those_of_xxhash() -> None:
    pool = _noise(4).cuda()
    blocks = [7, 0, 63]
    expected = tuple(xxhash.xxh3_64_intdigest(_noise(4)[block].view(torch.uint8).numpy().tobytes()) for block in blocks)
    assert CudaDeviceMemory(pool).digests(blocks, pool[0].nbytes) == expected


def test_the_measured_copy_speed_is_one_of_a_gpu() -> None:
    assert 1e11 < CudaDeviceMemory(_noise(5).cuda()).copy_bytes_per_s < 1e13
