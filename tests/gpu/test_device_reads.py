"""Reads by nixl from the pool of another process on the same GPU.

As in a worker, a thread owns each transport, and has not used CUDA before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

import pytest
import torch

from core.errors import PeerDisconnected
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.location import locate
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, ReadEnd

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)
NUM_BLOCKS = 256
NUM_BYTES = NUM_BLOCKS * LAYOUT.block_bytes  # 512 MiB
SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 20.0

Found = TypeVar("Found")


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (NUM_BLOCKS, LAYOUT.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)


class End:
    """A pool of noise, and its transport."""

    def __init__(self, name: str, seed: int) -> None:
        from kv_transfer.transports.nixl_transport import NixlTransport

        self.bytes = noise(seed)
        torch.cuda.synchronize()
        self._thread = ThreadPoolExecutor(1)
        pool = PoolMemory(
            self.bytes.data_ptr(), NUM_BLOCKS, LAYOUT, None, device=0, memory=CudaDeviceMemory(self.bytes)
        )
        self.transport = self.call(lambda: NixlTransport(name, on_device=True))
        self.call(lambda: self.transport.register(pool))
        self.address = AgentAddress(
            name, 1, self.call(self.transport.metadata), pool.address, NUM_BLOCKS, LAYOUT, 20.0,
            location=locate(pool), device=0,
        )  # fmt: skip

    def call(self, work: Callable[[], Found]) -> Found:
        return self._thread.submit(work).result(PATIENCE_S + 10)

    def read(self, peer: str, sources: list[int], targets: list[int]) -> ReadEnd:
        """The end of a read, whatever it is."""
        handle = self.transport.start_block_read(peer, sources, targets)
        if self.transport.try_complete(handle):
            return ReadDone(handle)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for event in self.transport.poll():
                if isinstance(event, ReadDone | ReadBroken):
                    return event
        raise AssertionError(f"the read did not end within {PATIENCE_S} s")


def own_pool(pipe: Connection) -> None:
    """The peer: polls its transport until it is killed."""
    end = End("owner", 1)
    pipe.send(end.address)
    reader = pipe.recv()
    end.call(lambda: end.transport.connect(reader))
    pipe.send("connected")
    while True:
        end.call(end.transport.poll)


class Peer:
    def __init__(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=own_pool, args=(theirs,), daemon=True)
        self.process.start()
        assert self.pipe.poll(120), "the peer did not open its pool"
        self.address: AgentAddress = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def ends() -> Iterator[tuple[End, Peer]]:
    pytest.importorskip("kv_transfer.transports.nixl_transport", reason="nixl is not installed", exc_type=ImportError)
    peer = Peer()
    end = End("reader", 2)
    peer.pipe.send(end.address)
    assert peer.pipe.poll(PATIENCE_S)
    end.call(lambda: end.transport.connect(peer.address))
    yield end, peer
    peer.kill()
    end.call(end.transport.close)


def test_shuffled_blocks_of_another_process_arrive_and_others_stay(ends: tuple[End, Peer]) -> None:
    end, _ = ends
    draw = random.Random(1)
    sources, targets = (draw.sample(range(NUM_BLOCKS), 100) for _ in range(2))
    assert isinstance(end.call(lambda: end.read("owner", sources, targets)), ReadDone)
    expected = noise(2)
    expected[targets] = noise(1)[sources]
    assert torch.equal(end.bytes, expected)


def test_reads_end_and_other_blocks_stay_when_the_peer_is_killed(ends: tuple[End, Peer]) -> None:
    """A read that begins once UCX has seen the death is refused; it may also break, or be done."""
    end, peer = ends
    half = list(range(NUM_BLOCKS // 2))
    expected = noise(2)[NUM_BLOCKS // 2 :]
    for number in range(20):
        if number == 5:
            peer.kill()
        with contextlib.suppress(PeerDisconnected) if number >= 5 else contextlib.nullcontext():
            end.call(lambda: end.read("owner", half[::-1], half))
    end.call(lambda: end.transport.disconnect("owner"))
    assert torch.equal(end.bytes[NUM_BLOCKS // 2 :], expected), "a block beside the read has changed"
    assert (end.bytes[0] != end.bytes[-1]).any(), "the device computes no more"


def test_the_memory_of_a_killed_peer_is_free_once_it_is_disconnected(ends: tuple[End, Peer]) -> None:
    end, peer = ends
    assert isinstance(end.call(lambda: end.read("owner", [0], [0])), ReadDone)
    before = torch.cuda.mem_get_info()[0]
    peer.kill()
    end.call(lambda: end.transport.disconnect("owner"))
    deadline = time.monotonic() + PATIENCE_S
    while torch.cuda.mem_get_info()[0] < before + NUM_BYTES:
        assert time.monotonic() < deadline, "the peer's pool is mapped still"
        end.call(end.transport.poll)
        time.sleep(0.05)  # the driver frees the memory of a killed process a moment later
