"""The promises of `DeviceMemory`, kept by the fake and by CudaDeviceMemory on the host and on a GPU."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch

from core.errors import TransportError
from engine.gpu.cuda_driver import Allocation
from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.device.device_memory import Copies, DeviceMemory
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.protocol.digests import of_blocks

NUM_BLOCKS, BLOCK_BYTES = 24, 4096


class HostDriver:
    """Exports addresses of this process."""

    def enter(self, device: int) -> None: ...

    def allocation_of(self, address: int) -> Allocation:
        return Allocation(address, NUM_BLOCKS * BLOCK_BYTES)

    def export(self, base: int) -> bytes:
        return base.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        raise TransportError(f"no such allocation: {handle.hex()}")

    def close(self, base: int) -> None: ...


@dataclass
class Pool:
    memory: DeviceMemory
    tensor: torch.Tensor  # uint8 [NUM_BLOCKS, BLOCK_BYTES]

    def block(self, number: int) -> int:
        return self.tensor.data_ptr() + number * BLOCK_BYTES

    def bytes(self) -> torch.Tensor:
        return self.tensor.cpu().clone()

    def copy(self, copies: Copies) -> None:
        handle = self.memory.start_copies(copies)
        give_up = time.monotonic() + 10
        while not self.memory.has_ended(handle):
            assert time.monotonic() < give_up, "the copies did not end"


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
    return Pool(CudaDeviceMemory(noise, HostDriver(), probe_bytes=1 << 20), noise)


@pytest.fixture(params=["fake", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def test_blocks_of_a_mapped_pool_arrive_and_others_stay(kind: str) -> None:
    ours, theirs = make_pool(kind, 1), make_pool(kind, 2)
    expected, source = ours.bytes(), theirs.bytes()
    base = ours.memory.map(theirs.memory.export())
    chosen = random.Random(1)
    pairs = list(zip(chosen.sample(range(NUM_BLOCKS), 9), chosen.sample(range(NUM_BLOCKS), 9), strict=True))

    ours.copy([(base + s * BLOCK_BYTES, ours.block(t), BLOCK_BYTES) for s, t in pairs])
    ours.memory.unmap(base)

    for s, t in pairs:
        expected[t] = source[s]
    assert torch.equal(ours.bytes(), expected)
    assert torch.equal(theirs.bytes(), source)


def test_runs_of_any_length_and_address_arrive(kind: str) -> None:
    pool = make_pool(kind, 1)
    expected = pool.bytes().view(-1)
    half = len(expected) // 2
    runs = [(0, half, 10_000), (10_001, half + 10_003, 777), (20_004, half + 20_000, 4), (30_000, half + 30_000, 9_999)]

    pool.copy([(pool.block(0) + s, pool.block(0) + t, size) for s, t, size in runs])

    for s, t, size in runs:
        expected[t : t + size] = expected[s : s + size].clone()
    assert torch.equal(pool.bytes().view(-1), expected)


def test_later_copies_see_what_earlier_ones_wrote(kind: str) -> None:
    pool = make_pool(kind, 1)
    first = pool.bytes()[0]
    copies = [[(pool.block(n), pool.block(n + 1), BLOCK_BYTES)] for n in range(6)]
    handles = [pool.memory.start_copies(batch) for batch in copies[:-1]]
    pool.copy(copies[-1])
    assert torch.equal(pool.bytes()[6], first)
    assert [pool.memory.has_ended(handle) for handle in handles] == [True] * 5


def test_digests_are_those_of_the_host(kind: str) -> None:
    pool = make_pool(kind, 1)
    blocks = [5, 0, NUM_BLOCKS - 1]
    expected = of_blocks(memoryview(pool.bytes().view(-1).numpy().data), blocks, BLOCK_BYTES)
    assert pool.memory.digests(blocks, BLOCK_BYTES) == expected


def test_a_handle_of_nobody_is_a_transport_error(kind: str) -> None:
    with pytest.raises(TransportError):
        make_pool(kind, 1).memory.map(b"nobody")


def test_the_copy_speed_is_known(kind: str) -> None:
    assert make_pool(kind, 1).memory.copy_bytes_per_s > 0
