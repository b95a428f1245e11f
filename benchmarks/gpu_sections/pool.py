"""One end of a hand-off: a pool of random bytes on the device, and a transport.

    python -m benchmarks.gpu_sections.pool NUM_BLOCKS [--rehearse]     the owner, which obeys the methods of PoolEnd

The owner polls its transport between commands. In a rehearsal the pool is in host memory.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_sections.harness import ROOT
from benchmarks.gpu_sections.measure import finish
from benchmarks.processes import ChildProcess, obey, take_stdout
from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.location import locate
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, Transport

LLAMA_8B = KVLayout("bench", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)
TINY = KVLayout("bench", "float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=16)
READ_TIMEOUT_S = 20.0
OWNER_SEED, READER_SEED = 7, 8

Pairs = Sequence[tuple[int, int, int]]  # (source block, target block, blocks)


class PoolEnd:
    """`bytes`: the pool, uint8 [num_blocks * block_bytes]."""

    def __init__(self, num_blocks: int, rehearse: bool, seed: int) -> None:
        self.layout = TINY if rehearse else LLAMA_8B
        self.num_blocks = num_blocks
        self.rehearse = rehearse
        num_bytes = num_blocks * self.layout.block_bytes
        if rehearse:
            fake = FakeDeviceMemory(num_bytes)
            self.memory: Any = fake
            self.bytes = torch.from_numpy(fake.bytes)
            self.bytes.copy_(random_bytes(num_bytes, self.bytes.device, seed))
        else:
            from engine.gpu.device_memory import CudaDeviceMemory

            self.bytes = random_bytes(num_bytes, torch.device("cuda", 0), seed)
            finish(self.bytes.device)  # a peer that maps the pool does not wait for our streams
            shape = (num_blocks, *self.layout.block_shape)
            self.memory = CudaDeviceMemory(self.bytes.view(torch.bfloat16).view(shape))
        self.transport: Transport | None = None

    # ---- the transport

    def open(self, name: str) -> str:
        """Open a transport. Returns its address, pickled."""
        from kv_transfer.transports.nixl_transport import NixlTransport

        device, view = (None, memoryview(self.memory.bytes.data)) if self.rehearse else (0, None)
        opened = NixlTransport(name, on_device=not self.rehearse)
        pool = PoolMemory(self.bytes.data_ptr(), self.num_blocks, self.layout, view, device, memory=self.memory)
        opened.register(pool)
        self.transport = opened
        address = AgentAddress(
            name=name, incarnation=1, metadata=opened.metadata(), pool_base=pool.address, num_blocks=self.num_blocks,
            layout=self.layout, lease_s=20.0, location=locate(pool), device=device,
        )  # fmt: skip
        return base64.b64encode(pickle.dumps(address)).decode()

    def connect(self, address: str) -> None:
        assert self.transport is not None
        self.transport.connect(pickle.loads(base64.b64decode(address)))

    def read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Read blocks in reads of as many blocks, with as many in flight, as the agent has."""
        assert self.transport is not None
        config, deadline = TransferConfig(), time.monotonic() + READ_TIMEOUT_S
        step = config.blocks_per_read(self.layout.block_bytes)
        left = deque(range(0, len(sources), step))
        in_flight = 0
        while left or in_flight:
            while left and in_flight < config.max_reads_in_flight:
                part = slice(left[0], left.popleft() + step)
                handle = self.transport.start_block_read(peer, sources[part], targets[part])
                in_flight += not self.transport.try_complete(handle)
            for event in self.transport.poll():
                if isinstance(event, ReadBroken):
                    raise event.error
                in_flight -= isinstance(event, ReadDone)
            if time.monotonic() > deadline:
                raise TransportError(f"the read has not ended after {READ_TIMEOUT_S} s")

    def idle(self) -> None:
        """Called between the commands of the reader."""
        if self.transport is not None:
            self.transport.poll()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None


def start_owner(num_blocks: int, rehearse: bool) -> ChildProcess:
    command = [sys.executable, "-m", "benchmarks.gpu_sections.pool", str(num_blocks), *["--rehearse"] * rehearse]
    return ChildProcess("the owner of the pool", command, directory=ROOT)


def random_bytes(num_bytes: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


if __name__ == "__main__":
    answers = take_stdout()
    obey(PoolEnd(int(sys.argv[1]), "--rehearse" in sys.argv, OWNER_SEED), answers)
