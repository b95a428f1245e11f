"""CudaDeviceMemory on a GPU."""

from __future__ import annotations

import pytest
import torch
import xxhash

from engine.gpu.device_memory import CudaDeviceMemory

pytestmark = pytest.mark.gpu

SHAPE = (64, 4, 2, 2, 16, 64)


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_digests_are_those_of_xxhash() -> None:
    pool = _noise(4).cuda()
    blocks = [7, 0, 63]
    expected = tuple(xxhash.xxh3_64_intdigest(_noise(4)[block].view(torch.uint8).numpy().tobytes()) for block in blocks)
    assert CudaDeviceMemory(pool).digests(blocks, pool[0].nbytes) == expected


def test_blocks_go_to_the_host_and_back_while_the_device_computes() -> None:
    """Both threads of the tier, beside a stream that is never idle: the copies end before its work does."""
    pool = _noise(6).cuda()
    memory = CudaDeviceMemory(pool)
    matrix = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    buffer = memory.host_buffer(pool[0].nbytes)
    torch.cuda.synchronize()
    for _ in range(200):
        matrix @ matrix
    ended = torch.cuda.Event()
    ended.record()
    memory.copy_out(7, buffer)
    assert buffer.tobytes() == _noise(6)[7].view(torch.uint8).numpy().tobytes()
    memory.copy_in(9, buffer)
    assert not ended.query(), "a copy has waited for the step"
    assert torch.equal(pool[9], pool[7])


def test_the_measured_copy_speed_is_one_of_a_gpu() -> None:
    assert 1e11 < CudaDeviceMemory(_noise(5).cuda()).copy_bytes_per_s < 1e13
