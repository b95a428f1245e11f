"""CudaDeviceMemory on a GPU."""

from __future__ import annotations

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


def test_digests_are_those_of_xxhash() -> None:
    pool = _noise(4).cuda()
    blocks = [7, 0, 63]
    expected = tuple(xxhash.xxh3_64_intdigest(_noise(4)[block].view(torch.uint8).numpy().tobytes()) for block in blocks)
    assert CudaDeviceMemory(pool).digests(blocks, pool[0].nbytes) == expected


def test_the_measured_copy_speed_is_one_of_a_gpu() -> None:
    assert 1e11 < CudaDeviceMemory(_noise(5).cuda()).copy_bytes_per_s < 1e13
