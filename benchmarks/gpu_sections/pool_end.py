"""One end of a hand-off: a pool of random bytes on the device, and a transport of one path. In a rehearsal the pool is
in the memory of a pretended device (`FakeDeviceMemory`).
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_sections.measure import finish
from core.errors import TransportError
from core.handoff import AgentAddress, DevicePath
from core.kv_layout import KVLayout
from kv_transfer.device.device_memory import Copy
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.location import locate
from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.device.device_transport import DeviceTransport
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, Transport

LLAMA_8B = KVLayout("bench", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)
TINY = KVLayout("bench", "float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=16)
READ_TIMEOUT_S = 20.0
STAGING_BYTES = 1 << 27
SEED = 7
BUSY_CYCLES = 100_000_000  # about 50 ms


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
            shape = (num_blocks, *self.layout.block_shape)
            finish(self.bytes.device)  # a peer that maps the pool does not wait for our streams
            self.memory = CudaDeviceMemory(self.bytes.view(torch.bfloat16).view(shape))
        self.transport: Transport | None = None

    def address(self) -> int:
        return self.bytes.data_ptr()

    def copy(self, base: int, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Copy (source block, target block, blocks) from the pool at `base`, and wait."""
        size = self.layout.block_bytes
        copies = [Copy(base + s * size, self.address() + t * size, count * size) for s, t, count in pairs]
        copy_and_wait(self.memory, copies)

    def seconds_on_device(self, base: int, pairs: Sequence[tuple[int, int, int]]) -> float:
        """Of the copies alone: the stream is kept busy while the host prepares them."""
        if self.rehearse:
            start = time.perf_counter()
            self.copy(base, pairs)
            return time.perf_counter() - start
        queue = self.memory._copying
        with queue.computing():
            torch.cuda._sleep(BUSY_CYCLES)
            begun = queue.mark()
        size = self.layout.block_bytes
        handle = self.memory.start_copies(
            [Copy(base + s * size, self.address() + t * size, count * size) for s, t, count in pairs]
        )
        assert not begun.has_ended(), "the host was slower than the pause"
        ended = self.memory._in_flight[handle]
        while not self.memory.has_ended(handle):
            pass
        found: float = ended.seconds_since(begun)
        return found

    # ---- the transport

    def open(self, name: str, path: str) -> str:
        """Open a transport of this path alone. Returns its address, pickled."""
        from kv_transfer.transports.nixl_transport import NixlTransport

        opened = DeviceTransport(name, NixlTransport, frozenset({DevicePath(path)}), STAGING_BYTES)
        pool = PoolMemory(self.address(), self.num_blocks, self.layout, None, device=0, memory=self.memory)
        opened.register(pool)
        self.transport = opened
        address = AgentAddress(
            name=name,
            incarnation=1,
            metadata=opened.metadata(),
            pool_base=pool.address,
            num_blocks=self.num_blocks,
            layout=self.layout,
            lease_s=20.0,
            location=locate(pool),
            access=opened.access(),
        )
        return base64.b64encode(pickle.dumps(address)).decode()

    def connect(self, address: str) -> str:
        """Returns the lane of reads from the peer."""
        assert self.transport is not None
        peer = pickle.loads(base64.b64decode(address))
        self.transport.connect(peer)
        return self.transport.lane(peer.name).value

    def read(self, peer: str, pairs: Sequence[tuple[int, int, int]]) -> None:
        assert self.transport is not None
        size, deadline = self.layout.block_bytes, time.monotonic() + READ_TIMEOUT_S
        self.transport.start_read(peer, [ByteRun(s * size, t * size, count * size) for s, t, count in pairs])
        while time.monotonic() < deadline:
            for event in self.transport.poll():
                if isinstance(event, ReadDone):
                    return
                if isinstance(event, ReadBroken):
                    raise event.error
        raise TransportError(f"the read has not ended after {READ_TIMEOUT_S} s")

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None


class PoolOwner:
    """A pool in a process of its own. Each public method is a command."""

    def __init__(self, num_blocks: int, rehearse: bool) -> None:
        self._end = PoolEnd(num_blocks, rehearse, SEED)

    def export(self) -> dict[str, str]:
        return {"handle": base64.b64encode(self._end.memory.export()).decode()}

    def open(self, path: str) -> dict[str, str]:
        return {"address": self._end.open("owner", path)}

    def connect(self, address: str) -> dict[str, str]:
        return {"lane": self._end.connect(address)}

    def close(self) -> dict[str, str]:
        self._end.close()
        return {}

    def idle(self) -> None:
        """Called while no command is there."""
        if self._end.transport is not None:
            self._end.transport.poll()


def copy_and_wait(memory: Any, copies: Sequence[Copy]) -> None:
    handle = memory.start_copies(copies)
    while not memory.has_ended(handle):
        pass  # a sleep is longer than the end of a copy is late


def random_bytes(num_bytes: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)
