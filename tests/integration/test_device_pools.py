"""Hand-offs between pools on pretended devices, and between a device and host memory: agents, machines and nixl."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AbortReason, DevicePath
from core.kv_layout import KVLayout
from core.paths import Lane, PathState, PeerJoined
from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.device.device_transport import DeviceTransport
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, Transport, TransportEvent
from tests.integration.test_device_memory_contract import HostDriver
from tests.integration.transfer_owner_process import address_of, device_pool, known_bytes
from tests.integration.transfer_worker import LAYOUT, PATIENCE_S, HandOff, Kind, TransferWorker
from tests.support.host_nixl import HostNixl, open_host_nixl

CONFIG = TransferConfig(max_blocks_per_read=16, read_grace_s=20.0)  # a busy machine is no broken path
MAPPED, DIRECT = DevicePath


def opener(*paths: DevicePath) -> Callable[[str], Transport]:
    return lambda name: DeviceTransport(name, open_host_nixl, frozenset(paths))


HOST = Kind(NixlTransport)
DIRECT_HOST = Kind(opener(DIRECT))


def engine_pool(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
    """A pool over the memory that the engine's runner gives a worker, here with its operators for the CPU."""
    tensor = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    memory: Any = CudaDeviceMemory(tensor, HostDriver(), probe_bytes=1 << 20)
    return tensor.numpy(), PoolMemory(tensor.data_ptr(), num_blocks, layout, None, 0, 0, memory)


ENGINE = Kind(opener(MAPPED), engine_pool)


def on_device(*paths: DevicePath, device: int = 0) -> Kind:
    return Kind(opener(*paths), functools.partial(device_pool, device=device))


def hand_off_between(owner: Kind, puller: Kind, puller_layout: KVLayout = LAYOUT) -> HandOff:
    return HandOff(owner, puller, CONFIG, puller_layout)


@pytest.mark.parametrize(
    ("owner", "puller"),
    [
        pytest.param(on_device(MAPPED, DIRECT), on_device(MAPPED, DIRECT, device=1), id="mapped"),
        pytest.param(on_device(DIRECT), on_device(MAPPED, DIRECT, device=1), id="direct"),
        pytest.param(ENGINE, ENGINE, id="the engine's memory, mapped"),
        pytest.param(HOST, on_device(MAPPED, DIRECT), id="host to device"),
        pytest.param(on_device(MAPPED, DIRECT), DIRECT_HOST, id="device to host"),
        pytest.param(HOST, DIRECT_HOST, id="host to host that may read devices"),
    ],
)
def test_a_hand_off_moves_every_block_and_its_digests_fit(owner: Kind, puller: Kind) -> None:
    hand_off = hand_off_between(owner, puller)
    hand_off.run()
    assert hand_off.assert_moved().stats.num_blocks_reread == 0
    hand_off.close()


@pytest.mark.parametrize("path", list(DevicePath))
def test_a_byte_that_changes_after_its_digest_is_noticed(path: DevicePath) -> None:
    hand_off = hand_off_between(on_device(path), on_device(path))
    digests = FakeDeviceMemory.digests

    def digests_then_damage(memory: FakeDeviceMemory, blocks: tuple[int, ...], block_bytes: int) -> tuple[int, ...]:
        found = digests(memory, blocks, block_bytes)
        memory.bytes[blocks[0] * block_bytes] ^= 1
        return found

    owned = hand_off.owner.agent.pool.memory
    assert isinstance(owned, FakeDeviceMemory)
    owned.digests = functools.partial(digests_then_damage, owned)  # type: ignore[method-assign, assignment]
    hand_off.run()
    hand_off.assert_failed(AbortReason.DIGEST_MISMATCH)
    hand_off.close()


@pytest.mark.parametrize("path", list(DevicePath))
def test_pools_of_other_block_sizes_hand_off_without_digests(path: DevicePath) -> None:
    small = replace(LAYOUT, block_size=8)
    hand_off = hand_off_between(on_device(path), on_device(path), small)
    hand_off.run()
    hand_off.assert_completed()
    shape = (30, 2, 3, -1, 64)
    for position, source in enumerate(hand_off.sources):
        whole = hand_off.owner.bytes[source].view(np.uint16).reshape(shape)
        for part in (0, 1):
            target = hand_off.targets[2 * position + part]
            half = hand_off.puller.bytes[target].view(np.uint16).reshape(shape)
            assert np.array_equal(half, whole[:, :, :, part * 8 : part * 8 + 8])
    hand_off.close()


@pytest.mark.parametrize(
    ("paths", "lane", "state"),
    [((MAPPED, DIRECT), Lane.CUDA_IPC, PathState.FINE), ((DIRECT,), Lane.UNKNOWN, PathState.FALLBACK)],
)
def test_the_lane_of_a_measured_path_is_the_one_that_was_taken(
    paths: tuple[DevicePath, ...], lane: Lane, state: PathState
) -> None:
    def with_probe_bytes(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
        array, pool = device_pool(layout, num_blocks + 2)
        return array, replace(pool, num_blocks=num_blocks, probe_bytes=2 * layout.block_bytes)

    workers = [
        TransferWorker(name, opener(*paths), CONFIG, LAYOUT, 32, with_probe_bytes) for name in ("prefill", "decode")
    ]
    owner, puller = workers
    puller.take([PeerJoined(owner.machine.address, is_owner=True)])  # type: ignore[list-item]
    owner.take([PeerJoined(puller.machine.address, is_owner=False)])  # type: ignore[list-item]
    deadline = time.monotonic() + PATIENCE_S
    while puller.machine.paths[0].state is PathState.CONNECTING:
        assert time.monotonic() < deadline
        for worker in workers:
            worker.step(0.001)
    (path,) = puller.machine.paths
    assert (path.lane, path.state) == (lane, state)
    assert path.bytes_per_s > 0
    for worker in workers:
        worker.close()


# ---- transports alone


class Side:
    def __init__(self, name: str, kind: Kind, content: bool = False) -> None:
        self.transport = kind.open_transport(name)
        self.bytes, self.pool = kind.open_pool(LAYOUT, 32)
        if content:
            for block in range(32):
                self.bytes[block] = known_bytes(block)
        self.transport.register(self.pool)
        self.address = address_of(self.transport, self.pool)

    @property
    def device(self) -> FakeDeviceMemory:
        assert isinstance(self.pool.memory, FakeDeviceMemory)
        return self.pool.memory


def connect(sides: list[Side]) -> None:
    for side in sides:
        for other in sides:
            if other is not side:
                side.transport.connect(other.address)


def poll_all(sides: list[Side], num_events: int) -> dict[str, list[TransportEvent]]:
    events: dict[str, list[TransportEvent]] = {side.transport.name: [] for side in sides}
    deadline = time.monotonic() + PATIENCE_S
    while sum(map(len, events.values())) < num_events:
        assert time.monotonic() < deadline, events
        for side in sides:
            events[side.transport.name] += side.transport.poll()
    return events


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    opened: list[Side] = []
    yield opened
    for side in opened:
        side.transport.close()


def test_a_pool_that_cannot_be_mapped_is_read_by_the_next_path_with_a_warning(
    sides: list[Side], caplog: pytest.LogCaptureFixture
) -> None:
    sides += [Side("a", on_device(MAPPED, DIRECT), content=True), Side("b", on_device(MAPPED, DIRECT))]
    sides[1].device.failures.append(TransportError("no peer access"))
    connect(sides)
    assert [side.transport.lane(other) for side, other in zip(sides, "ba", strict=True)] == [
        Lane.CUDA_IPC,
        Lane.UNKNOWN,
    ]
    assert "no peer access" in caplog.text
    handle = sides[1].transport.start_block_read("a", (1, 2), (3, 5))
    assert poll_all(sides, 1)["b"] == [ReadDone(handle)]
    assert np.array_equal(sides[1].bytes[[3, 5]], sides[0].bytes[[1, 2]])


def test_a_pool_that_cannot_be_mapped_and_has_no_other_path_is_not_connected(sides: list[Side]) -> None:
    sides += [Side("a", on_device(MAPPED)), Side("b", on_device(MAPPED))]
    sides[1].device.failures.append(TransportError("no peer access"))
    with pytest.raises(TransportError, match="no peer access"):
        sides[1].transport.connect(sides[0].address)
    with pytest.raises(TransportError, match="not connected"):
        sides[1].transport.notify("a", b"")
    sides[1].transport.connect(sides[0].address)


def test_a_peer_without_a_common_path_is_not_connected_and_the_agent_lives(sides: list[Side]) -> None:
    sides += [Side("a", on_device(MAPPED)), Side("b", HOST)]
    with pytest.raises(TransportError, match="no path leads"):
        sides[0].transport.connect(sides[1].address)


def test_a_pool_on_a_device_that_no_code_of_ours_reaches_is_read_directly() -> None:
    """As for an engine without kernels of its own."""
    direct = Mock(metadata=lambda: b"keys", poll=list, busy=False)
    transport = DeviceTransport(
        "a", lambda name, on_gpu: direct if on_gpu else NixlTransport(name), frozenset({MAPPED})
    )
    pool = PoolMemory(4096, 4, LAYOUT, None, device=1)
    transport.register(pool)
    direct.register.assert_called_once_with(pool)
    access = transport.access()
    assert (access.device, access.paths, access.direct_metadata) == (1, {DIRECT}, b"keys")
    transport.close()


class DirectUnregistered(HostNixl):
    def register(self, pool: PoolMemory) -> None:  # noqa: ARG002
        raise TransportError("nvidia-peermem is not loaded")


def unregistered(*paths: DevicePath) -> Kind:
    def open_transport(name: str, on_device: bool) -> Transport:
        return DirectUnregistered(name) if on_device else NixlTransport(name)

    return Kind(lambda name: DeviceTransport(name, open_transport, frozenset(paths)), device_pool)


def test_a_pool_that_cannot_be_registered_is_read_by_the_next_path_with_a_warning(
    sides: list[Side], caplog: pytest.LogCaptureFixture
) -> None:
    sides += [Side("a", unregistered(MAPPED, DIRECT), content=True), Side("b", on_device(MAPPED, DIRECT))]
    assert "nvidia-peermem is not loaded" in caplog.text
    assert sides[0].transport.access().paths == {MAPPED}
    connect(sides)
    handle = sides[1].transport.start_block_read("a", (1, 2), (3, 5))
    assert poll_all(sides, 1)["b"] == [ReadDone(handle)]
    assert np.array_equal(sides[1].bytes[[3, 5]], sides[0].bytes[[1, 2]])


def test_a_pool_that_cannot_be_registered_and_has_no_other_path_is_refused() -> None:
    with pytest.raises(TransportError, match="nvidia-peermem"):
        Side("a", unregistered(DIRECT))


def test_a_pool_is_unmapped_only_when_no_copy_from_it_is_in_flight(sides: list[Side]) -> None:
    sides += [Side("a", on_device(MAPPED), content=True), Side("b", on_device(MAPPED))]
    connect(sides)
    reader, device = sides[1].transport, sides[1].device
    device.polls_per_copy = 5
    handle = reader.start_block_read("a", (1,), (1,))
    reader.disconnect("a")
    assert device.num_mapped == 1
    (event,) = poll_all(sides, 1)["b"]
    assert isinstance(event, ReadBroken)
    assert (event.handle, device.num_mapped) == (handle, 0)
