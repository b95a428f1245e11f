"""nixl that takes the memory of a pretended device for what it is: host memory. For the direct path."""

from __future__ import annotations

from dataclasses import replace

from core.handoff import AgentAddress, PoolAccess
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory, Transport


class HostNixl(NixlTransport):
    def register(self, pool: PoolMemory) -> None:
        if isinstance(pool.memory, FakeDeviceMemory):
            pool = replace(pool, device=None, memory=None, view=memoryview(pool.memory.bytes.data))
        super().register(pool)

    def connect(self, peer: AgentAddress) -> None:
        super().connect(replace(peer, access=PoolAccess()))


def open_host_nixl(name: str, on_device: bool) -> Transport:
    return HostNixl(name) if on_device else NixlTransport(name)
