"""A process that owns a pool of known bytes and serves it over the transport it is told until it is killed.

Prints one line: its AgentAddress in hex.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.location import locate
from kv_transfer.transports.transport import PoolMemory, Transport
from protos import codec
from tandem_client.stubs import worker_pb2
from tests.support import transfer_worker

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=64)
NUM_BLOCKS = 64


def host_pool(layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS) -> tuple[np.ndarray, PoolMemory]:
    return transfer_worker.host_pool(layout, num_blocks)


def device_pool(
    layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS, device: int = 0
) -> tuple[np.ndarray, PoolMemory]:
    """The same in the memory of a pretended device."""
    memory = FakeDeviceMemory(num_blocks * layout.block_bytes, device)
    return memory.bytes.reshape(num_blocks, -1), PoolMemory(memory.address, num_blocks, layout, None, device, 0, memory)


def address_of(transport: Transport, pool: PoolMemory) -> AgentAddress:
    return AgentAddress(
        transport.name,
        1,
        transport.metadata(),
        pool.address,
        pool.num_blocks,
        pool.layout,
        lease_s=20.0,
        probe_bytes=pool.probe_bytes,
        location=locate(pool),
        device=pool.device,
    )


def real_transport(kind: str) -> Callable[[str], Transport]:
    """nixl or ucxx; skips the test where it is not installed."""
    module = pytest.importorskip(f"kv_transfer.transports.{kind}_transport", reason=f"{kind} is not installed")
    return getattr(module, f"{kind.capitalize()}Transport")


def known_bytes(block: int) -> int:
    return block % 251 + 1


def to_line(address: AgentAddress) -> str:
    return codec.encode_agent(address).SerializeToString().hex()


def from_line(line: str) -> AgentAddress:
    return codec.decode_agent(worker_pb2.AgentAddress.FromString(bytes.fromhex(line)))


def serve(kind: str) -> None:
    array, pool = host_pool()
    for block in range(NUM_BLOCKS):
        array[block] = known_bytes(block)
    transport = real_transport(kind)("owner-process")
    transport.register(pool)
    print(to_line(address_of(transport, pool)), flush=True)
    while True:  # until killed; a transport has nothing that could be waited on
        transport.poll()
        time.sleep(0.0003)


if __name__ == "__main__":
    serve(sys.argv[1])
