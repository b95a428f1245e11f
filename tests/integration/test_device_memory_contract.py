"""The promises of `DeviceMemory`, kept by the fake and by CudaDeviceMemory on the host and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.protocol.digests import of_blocks

NUM_BLOCKS, BLOCK_BYTES = 24, 4096


@dataclass
class Pool:
    memory: DeviceMemory
    tensor: torch.Tensor  # uint8 [NUM_BLOCKS, BLOCK_BYTES]

    def bytes(self) -> torch.Tensor:
        return self.tensor.cpu().clone()


def make_pool(kind: str, seed: int) -> Pool:
    noise = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), generator=torch.Generator().manual_seed(seed))
    noise = noise.to(torch.uint8)
    if kind == "fake":
        fake = FakeDeviceMemory(NUM_BLOCKS * BLOCK_BYTES, copy_bytes_per_s=1e9)
        tensor = torch.from_numpy(fake.bytes).view(NUM_BLOCKS, BLOCK_BYTES)
        tensor.copy_(noise)
        return Pool(fake, tensor)
    if kind == "cuda":
        tensor = noise.cuda()
        return Pool(CudaDeviceMemory(tensor), tensor)
    return Pool(CudaDeviceMemory(noise, probe_bytes=1 << 20), noise)


@pytest.fixture(params=["fake", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def test_digests_are_those_of_the_host(kind: str) -> None:
    pool = make_pool(kind, 1)
    blocks = [5, 0, NUM_BLOCKS - 1]
    expected = of_blocks(memoryview(pool.bytes().view(-1).numpy().data), blocks, BLOCK_BYTES)
    assert pool.memory.digests(blocks, BLOCK_BYTES) == expected


def test_the_copy_speed_is_known(kind: str) -> None:
    assert make_pool(kind, 1).memory.copy_bytes_per_s > 0
