"""The laws of kv_transfer/transports/transport.py, for every transport, and what only some of them can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.plan import Run
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import Notification, ReadBroken, ReadDone, Transport, TransportEvent
from tests.integration.transfer_owner_process import (
    LAYOUT,
    NUM_BLOCKS,
    address_of,
    host_pool,
    known_bytes,
    real_transport,
)

SIZE = LAYOUT.block_bytes
ROOT = Path(__file__).parents[2]
OVER_SHARED_MEMORY = not os.environ.get("UCX_TLS", "").startswith("tcp")


class Ends:
    """Two connected transports and their pools; `a` owns known bytes, `b` reads."""

    def __init__(self, open_transport: Callable[[str], Transport]) -> None:
        self.a, self.b = open_transport("a"), open_transport("b")
        self.bytes_a, pool_a = host_pool()
        self.bytes_b, pool_b = host_pool()
        for block in range(NUM_BLOCKS):
            self.bytes_a[block] = known_bytes(block)
        self.a.register(pool_a)
        self.b.register(pool_b)
        self.address_a, self.address_b = address_of(self.a, pool_a), address_of(self.b, pool_b)
        self.a.connect(self.address_b)
        self.b.connect(self.address_a)

    def poll_until(self, enough: Callable[[list[TransportEvent]], bool], seconds: float = 5.0) -> list[TransportEvent]:
        """What `b` reports, while both poll, until it is enough."""
        events: list[TransportEvent] = []
        deadline = time.monotonic() + seconds
        while not enough(events):
            assert time.monotonic() < deadline, f"not enough after {seconds} s: {events}"
            self.a.poll()
            events += self.b.poll()
        return events

    def read(self, runs: list[Run]) -> None:
        handle = self.b.start_read("a", runs)
        assert self.poll_until(bool) == [ReadDone(handle)]


def opener(kind: str) -> Callable[[str], Transport]:
    fabric = MemoryFabric()
    if kind == "memory":
        return lambda name: MemoryTransport(name, fabric)
    return real_transport(kind)


@pytest.fixture(params=["memory", "nixl", "ucxx"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(opener(request.param))
    yield both
    both.a.close()
    both.b.close()


def blocks(pairs: list[tuple[int, int]]) -> list[Run]:
    return [Run(source * SIZE, target * SIZE, SIZE) for source, target in pairs]


class TestContract:
    def test_a_read_fills_its_targets_and_nothing_else(self, ends: Ends) -> None:
        pairs = [(3, 10), (4, 11), (9, 2), (63, 63)]
        ends.read(blocks(pairs))
        expected = np.zeros_like(ends.bytes_b)
        for source, target in pairs:
            expected[target] = known_bytes(source)
        assert np.array_equal(ends.bytes_b, expected)

    def test_whole_blocks_move_by_their_numbers(self, ends: Ends) -> None:
        sources, targets = (3, 4, 5, 9, 63), (10, 11, 12, 2, 63)
        handle = ends.b.start_block_read("a", sources, targets)
        assert ends.poll_until(bool) == [ReadDone(handle)]
        expected = np.zeros_like(ends.bytes_b)
        for source, target in zip(sources, targets, strict=True):
            expected[target] = known_bytes(source)
        assert np.array_equal(ends.bytes_b, expected)

    def test_a_run_may_span_blocks(self, ends: Ends) -> None:
        ends.read([Run(2 * SIZE, 5 * SIZE, 3 * SIZE)])
        assert [int(block[0]) for block in ends.bytes_b[4:9]] == [0, known_bytes(2), known_bytes(3), known_bytes(4), 0]

    def test_a_run_may_be_any_piece_of_a_pool(self, ends: Ends) -> None:
        ends.read([Run(SIZE + 5, 7, 100), Run(9 * SIZE - 1, 500, 2)])
        flat = ends.bytes_b.reshape(-1)
        assert set(flat[7:107]) == {known_bytes(1)}
        assert list(flat[500:502]) == [known_bytes(8), known_bytes(9)]
        assert np.count_nonzero(flat) == 102

    def test_many_reads_at_once_come_back_once_each(self, ends: Ends) -> None:
        handles = [ends.b.start_read("a", blocks([(block, block)])) for block in range(32)]
        events = ends.poll_until(lambda so_far: len(so_far) >= 32)
        assert sorted(event.handle for event in events) == sorted(handles)  # type: ignore[union-attr]
        assert np.array_equal(ends.bytes_b[:32], ends.bytes_a[:32])
        assert ends.b.poll() == []

    def test_a_read_that_ended_at_once_is_there_and_not_told_of_again(self, ends: Ends) -> None:
        ends.read(blocks([(0, 0)]))  # connects
        for block in range(1, 32):
            handle = ends.b.start_read("a", blocks([(block, block)]))
            if ends.b.take_ended(handle):
                assert (ends.bytes_b[block] == known_bytes(block)).all()
                assert not any(isinstance(event, ReadDone | ReadBroken) for event in ends.b.poll())
            else:
                assert ends.poll_until(bool) == [ReadDone(handle)]

    def test_notifications_arrive_once_and_in_order(self, ends: Ends) -> None:
        payloads = [bytes([number]) * size for number, size in enumerate([1, 10, 200_000, 5, 1000])]
        for payload in payloads:
            ends.a.notify("b", payload)
        events = ends.poll_until(lambda so_far: len(so_far) >= len(payloads))
        assert events == [Notification("a", payload) for payload in payloads]

    def test_both_directions_work_at_once(self, ends: Ends) -> None:
        ends.b.notify("a", b"hello")
        handle = ends.b.start_read("a", blocks([(1, 1)]))
        seen_a: list[TransportEvent] = []
        seen_b: list[TransportEvent] = []
        deadline = time.monotonic() + 5.0
        while not (seen_a and seen_b):
            assert time.monotonic() < deadline
            seen_a += ends.a.poll()
            seen_b += ends.b.poll()
        assert (seen_a, seen_b) == ([Notification("b", b"hello")], [ReadDone(handle)])

    @pytest.mark.parametrize(
        "run", [Run(NUM_BLOCKS * SIZE, 0, SIZE), Run(0, NUM_BLOCKS * SIZE, SIZE), Run(NUM_BLOCKS * SIZE - 1, 0, 2)]
    )
    def test_a_read_outside_a_pool_is_refused(self, ends: Ends, run: Run) -> None:
        with pytest.raises(TransportError):
            ends.b.start_read("a", [run])
        ends.read(blocks([(0, 0)]))

    @pytest.mark.parametrize(("source", "target"), [(NUM_BLOCKS, 0), (0, NUM_BLOCKS), (-1, 0)])
    def test_a_block_outside_a_pool_is_refused(self, ends: Ends, source: int, target: int) -> None:
        with pytest.raises(TransportError):
            ends.b.start_block_read("a", (1, source), (1, target))
        ends.read(blocks([(0, 0)]))

    def test_a_peer_that_is_not_connected_is_refused(self, ends: Ends) -> None:
        with pytest.raises(TransportError):
            ends.b.start_read("c", blocks([(0, 0)]))
        with pytest.raises(TransportError):
            ends.b.start_block_read("c", (0,), (0,))
        with pytest.raises(TransportError):
            ends.b.notify("c", b"")

    def test_a_cancelled_read_comes_back_once(self, ends: Ends) -> None:
        handle = ends.b.start_read("a", blocks([(block, block) for block in range(NUM_BLOCKS)]))
        ends.b.cancel(handle)
        ends.b.cancel(handle)
        (event,) = ends.poll_until(bool)
        assert isinstance(event, ReadBroken)
        assert event.handle == handle
        assert ends.b.poll() == []
        ends.read(blocks([(5, 6)]))

    def test_a_disconnected_peers_reads_break_and_it_may_be_connected_again(self, ends: Ends) -> None:
        handle = ends.b.start_read("a", blocks([(1, 1)]))
        ends.b.disconnect("a")
        (event,) = ends.poll_until(bool)
        assert isinstance(event, ReadBroken)
        assert (event.handle, type(event.error)) == (handle, PeerDisconnected)
        with pytest.raises(TransportError):
            ends.b.notify("a", b"")
        ends.b.disconnect("a")  # a second time does nothing
        ends.b.connect(ends.address_a)
        ends.read(blocks([(7, 8)]))


@pytest.mark.parametrize("kind", ["nixl", "ucxx"])
def test_the_contract_holds_over_tcp(kind: str) -> None:
    """UCX reads UCX_TLS once per process, so this takes another one."""
    real_transport(kind)
    which = f"{kind} and (TestContract or owner) and not shared_memory"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, __file__],
        env=os.environ | {"UCX_TLS": "tcp,self"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "19 passed" in result.stdout


# ---- the death of a peer


@dataclass(frozen=True)
class OwnerProcess:
    kind: str
    process: subprocess.Popen[str]
    address: AgentAddress


@pytest.fixture(params=["nixl", "ucxx"])
def owner(request: pytest.FixtureRequest) -> Iterator[OwnerProcess]:
    real_transport(request.param)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.transfer_owner_process", request.param],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    fields = json.loads(process.stdout.readline())
    address = AgentAddress(**fields | {"metadata": bytes.fromhex(fields["metadata"]), "layout": LAYOUT})
    yield OwnerProcess(request.param, process, address)
    process.kill()
    process.wait(5)
    process.stdout.close()


def poll_for(transport: Transport, seconds: float) -> list[TransportEvent]:
    events: list[TransportEvent] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        events += transport.poll()
    return events


def wait_for_end(transport: Transport, seconds: float) -> TransportEvent:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in transport.poll():
            return event
    raise AssertionError(f"the read did not end within {seconds} s")


def read_until_it_breaks(transport: Transport, peer: str, seconds: float) -> None:
    """The first reads after a death may still succeed. Raises what the broken one says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        transport.start_block_read(peer, (5,), (5,))
        event = wait_for_end(transport, seconds)
        if isinstance(event, ReadBroken):
            raise event.error


def reader_of(owner: OwnerProcess) -> tuple[Transport, np.ndarray]:
    """A transport that has read from the owner already, and its pool."""
    array, pool = host_pool()
    transport = real_transport(owner.kind)("reader")
    transport.register(pool)
    transport.connect(owner.address)
    handle = transport.start_read(owner.address.name, blocks([(3, 0), (60, 1)]))
    assert wait_for_end(transport, 5.0) == ReadDone(handle)
    assert [int(block[0]) for block in array[:2]] == [known_bytes(3), known_bytes(60)]
    return transport, array


@pytest.mark.parametrize("owner", ["nixl"], indirect=True)
def test_over_shared_memory_nixl_has_copied_when_start_read_returns(owner: OwnerProcess) -> None:
    """What makes hashing a slice cheap: without it each slice would wait for a poll."""
    transport, array = reader_of(owner)
    for block in range(8, 40):
        assert transport.take_ended(transport.start_block_read(owner.address.name, (block,), (block,)))
        assert (array[block] == known_bytes(block)).all()
    transport.close()


def test_a_killed_owner_is_noticed_by_the_next_read(owner: OwnerProcess) -> None:
    transport, _ = reader_of(owner)
    owner.process.send_signal(signal.SIGKILL)
    assert owner.process.wait(5) == -signal.SIGKILL
    with pytest.raises(PeerDisconnected):
        read_until_it_breaks(transport, owner.address.name, 2.0)
    transport.disconnect(owner.address.name)
    transport.close()


def test_a_read_from_a_frozen_owner_ends_by_itself_or_can_be_cancelled_for_good(owner: OwnerProcess) -> None:
    transport, array = reader_of(owner)
    owner.process.send_signal(signal.SIGSTOP)
    wanted = range(8, 40)
    handle = transport.start_block_read(owner.address.name, wanted, wanted)
    if owner.kind == "nixl" and OVER_SHARED_MEMORY:  # process_vm_readv needs nothing of a process that stands still
        assert wait_for_end(transport, 3.0) == ReadDone(handle)
        assert [int(block[0]) for block in array[8:40]] == [known_bytes(block) for block in range(8, 40)]
        transport.close()
        return
    assert poll_for(transport, 0.2) == [], "the owner's help was needed, and could not have come"
    transport.cancel(handle)
    events = poll_for(transport, 1.0)
    if owner.kind == "nixl":  # cannot take it back, and does not say so
        assert events == []
        owner.process.send_signal(signal.SIGCONT)
        events = [wait_for_end(transport, 3.0)]
    (event,) = events
    assert isinstance(event, ReadBroken)
    assert event.handle == handle
    array[8:40] = 0
    owner.process.send_signal(signal.SIGCONT)
    assert poll_for(transport, 0.5) == []
    assert not array[8:40].any(), "nothing is written after the end"
    transport.disconnect(owner.address.name)
    transport.connect(owner.address)
    handle = transport.start_block_read(owner.address.name, wanted, wanted)
    assert wait_for_end(transport, 5.0) == ReadDone(handle)
    assert [int(block[0]) for block in array[8:40]] == [known_bytes(block) for block in range(8, 40)]
    transport.close()


# ---- the faults of the fake


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
