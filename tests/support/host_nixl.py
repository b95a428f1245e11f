"""nixl that takes the memory of a pretended device for what it is: host memory."""

from __future__ import annotations

from dataclasses import replace

from core.handoff import AgentAddress
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory


class HostNixl(NixlTransport):
    def __init__(self, name: str, on_device: bool = True) -> None:  # noqa: ARG002
        super().__init__(name)

    def register(self, pool: PoolMemory) -> None:
        super().register(replace(pool, device=None, memory=None))

    def connect(self, peer: AgentAddress) -> None:
        super().connect(replace(peer, device=None))
