"""The fake transport makes the faults that it is told to, and counts them."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import PeerDisconnected, TransportError
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import ReadBroken
from tests.integration.transport_ends import Ends, blocks


@pytest.fixture
def faulty() -> tuple[MemoryFabric, Ends]:
    fabric = MemoryFabric()
    return fabric, Ends(lambda name: MemoryTransport(name, fabric))


def test_the_fake_drops_doubles_and_delays(faulty: tuple[MemoryFabric, Ends]) -> None:
    fabric, ends = faulty
    fates: list[tuple[int, ...]] = [(), (0, 0), (2,), (0,)]
    fabric.fate = lambda _sender, _receiver, payload: fates[payload[0]]
    for number in range(4):
        ends.a.notify("b", bytes([number]))
    arrived = [[event.payload[0] for event in ends.b.poll()] for _ in range(3)]  # type: ignore[union-attr]
    assert arrived == [[1, 1, 3], [], [2]]
    assert fabric.faults_done["fate"] == 3


def test_the_fake_fails_the_operation_it_is_told_to(faulty: tuple[MemoryFabric, Ends]) -> None:
    fabric, ends = faulty
    fabric.fail_operation(2, TransportError("as told"))
    ends.b.notify("a", b"1")
    with pytest.raises(TransportError, match="as told"):
        ends.b.start_read("a", blocks([(0, 0)]))
    ends.read(blocks([(0, 0)]))
    assert fabric.faults_done["fail"] == 1


def test_the_fake_flips_one_bit(faulty: tuple[MemoryFabric, Ends]) -> None:
    fabric, ends = faulty
    fabric.flip_byte_in_read(1)
    ends.read(blocks([(1, 1)]))
    assert np.count_nonzero(ends.bytes_b[1] != ends.bytes_a[1]) == 1
    assert fabric.faults_done["flip"] == 1


def test_the_fake_stalls_a_read_until_it_is_cancelled(faulty: tuple[MemoryFabric, Ends]) -> None:
    fabric, ends = faulty
    fabric.stall_reads = True
    handle = ends.b.start_read("a", blocks([(1, 1)]))
    assert ends.b.poll() == []
    assert fabric.faults_done["stall"] == 1
    ends.b.cancel(handle)
    (event,) = ends.b.poll()
    assert isinstance(event, ReadBroken)
    assert not ends.bytes_b.any()


def test_the_fake_lets_a_peer_die(faulty: tuple[MemoryFabric, Ends]) -> None:
    fabric, ends = faulty
    handle = ends.b.start_read("a", blocks([(1, 1)]))
    fabric.kill("a")
    (event,) = ends.b.poll()
    assert isinstance(event, ReadBroken)
    assert (event.handle, type(event.error)) == (handle, PeerDisconnected)
    with pytest.raises(PeerDisconnected):
        ends.b.notify("a", b"")
    assert fabric.faults_done["kill"] == 1
