"""Workers whose pools are on pretended devices, and nixl that takes their memory for what it is: host memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import engine.factory
import kv_transfer.transports.nixl_transport
from core.config import EngineConfig
from core.handoff import AgentAddress
from engine.fake_runner import FakeRunner
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory


class HostNixl(NixlTransport):
    def __init__(self, name: str, on_device: bool = True, is_local: bool = False) -> None:  # noqa: ARG002
        super().__init__(name, is_local=is_local)

    def register(self, pool: PoolMemory) -> None:
        super().register(replace(pool, device=None, memory=None))

    def connect(self, peer: AgentAddress) -> None:
        super().connect(replace(peer, device=None))


class DeviceRunner(FakeRunner):
    """The fake runner over the memory of a pretended device."""

    def __init__(self, runner: FakeRunner, device: int) -> None:
        super().__init__(runner.info, runner.layout, runner.num_blocks)
        self.memory = FakeDeviceMemory(runner.num_blocks * runner.layout.block_bytes, device, "GPU-0", 1e6)
        self._use_memory(self.memory.bytes)

    def pool_memory(self) -> None:  # type: ignore[override]
        return None

    def pool_device(self) -> int:
        return self.memory.device

    def device_memory(self) -> FakeDeviceMemory:  # type: ignore[override]
        return self.memory


def put_pools_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker that starts from now on has the next device, and nixl takes its memory for host memory."""
    devices = itertools.count()

    def build(config: EngineConfig, *_: object, **__: object) -> DeviceRunner:
        return DeviceRunner(FakeRunner.from_config(config), next(devices))

    monkeypatch.setattr(engine.factory, "build_runner", build)
    monkeypatch.setattr(kv_transfer.transports.nixl_transport, "NixlTransport", HostNixl)
