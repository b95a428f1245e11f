"""A process that owns a pool of known bytes and serves it over the transport it is told until it is killed.

Prints one line of JSON: its AgentAddress without the layout, with the metadata as hex.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.transports.transport import PoolMemory, Transport

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=64)
NUM_BLOCKS = 64


def host_pool(layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS) -> tuple[np.ndarray, PoolMemory]:
    """[num_blocks, block_bytes] of zeros, touched, and the PoolMemory over it."""
    array = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    array[:] = 0
    return array, PoolMemory(array.ctypes.data, num_blocks, layout, memoryview(array.reshape(-1).data))


def address_of(transport: object, pool: PoolMemory, incarnation: int = 1) -> AgentAddress:
    name, metadata = transport.name, transport.metadata()  # type: ignore[attr-defined]
    return AgentAddress(name, incarnation, metadata, pool.address, pool.num_blocks, pool.layout, lease_s=20.0)


def real_transport(kind: str) -> Callable[[str], Transport]:
    """nixl or ucxx; skips the test where it is not installed."""
    module = pytest.importorskip(f"kv_transfer.transports.{kind}_transport", reason=f"{kind} is not installed")
    return getattr(module, f"{kind.capitalize()}Transport")


def known_bytes(block: int) -> int:
    return block % 251 + 1


def serve(kind: str) -> None:
    array, pool = host_pool()
    for block in range(NUM_BLOCKS):
        array[block] = known_bytes(block)
    transport = real_transport(kind)("owner-process")
    transport.register(pool)
    fields = asdict(address_of(transport, pool)) | {"metadata": transport.metadata().hex()}
    del fields["layout"]
    print(json.dumps(fields), flush=True)
    while True:  # until killed; a transport has nothing that could be waited on
        transport.poll()
        time.sleep(0.0003)


if __name__ == "__main__":
    serve(sys.argv[1])
