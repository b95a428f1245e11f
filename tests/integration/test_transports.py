"""The laws of kv_transfer/transports/transport.py, for every transport."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash

from core.errors import PeerDisconnected, TransportError
from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.host_address import LOOPBACK
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import Notification, PoolMemory, ReadBroken, ReadDone, Transport, TransportEvent
from tests.integration.transfer_owner_process import LAYOUT, NUM_BLOCKS, host_pool, known_bytes, real_transport
from tests.integration.transport_ends import SIZE, Ends, blocks
from tests.support.unreliable_transport import Faults

ROOT = Path(__file__).parents[2]

Opening = Callable[[str], Transport]


def opener(kind: str) -> Opening:
    fabric = MemoryFabric()
    if kind == "memory":
        return lambda name: MemoryTransport(name, fabric)
    if kind == "unreliable":  # without its faults
        return Faults(Path(os.devnull), seed=0, rate=0.0).opening(opener("memory"))
    return real_transport(kind)


@pytest.fixture(params=["memory", "unreliable", "nixl", "ucxx"])
def opening(request: pytest.FixtureRequest) -> Opening:
    return opener(request.param)


@pytest.fixture
def ends(opening: Opening) -> Iterator[Ends]:
    both = Ends(opening)
    yield both
    both.a.close()
    both.b.close()


class TestContract:
    def test_a_read_fills_its_targets_and_nothing_else(self, ends: Ends) -> None:
        pairs = [(3, 10), (4, 11), (9, 2), (63, 63)]
        ends.read(blocks(pairs))
        expected = np.zeros_like(ends.bytes_b)
        for source, target in pairs:
            expected[target] = known_bytes(source)
        assert np.array_equal(ends.bytes_b, expected)

    @pytest.mark.parametrize("num_parts", [1, 4])
    def test_blocks_move_by_their_numbers_between_pools_of_two_sizes(self, opening: Opening, num_parts: int) -> None:
        """Part p of block b is at [p, b] of a pool, so the same part of one block lies elsewhere in a larger pool."""
        arrays = {}

        def pool(num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
            arrays[num_blocks] = array = np.zeros((num_parts, num_blocks, SIZE // num_parts), np.uint8)
            memory = PoolMemory(array.ctypes.data, num_blocks, LAYOUT, array.reshape(-1).data, num_parts=num_parts)
            return array.reshape(num_blocks, SIZE), memory

        sizes = iter((NUM_BLOCKS, NUM_BLOCKS + 7))
        ends = Ends(opening, lambda: pool(next(sizes)))
        theirs, ours = arrays[NUM_BLOCKS], arrays[NUM_BLOCKS + 7]
        theirs[:] = np.random.default_rng(1).integers(0, 256, theirs.shape, np.uint8)
        sources, targets = [3, 4, 5, 9, 63], [10, 11, 12, 2, 70]
        handle = ends.b.start_block_read("a", sources, targets)
        assert ends.poll_until(bool) == [ReadDone(handle)]
        expected = np.zeros_like(ours)
        expected[:, targets] = theirs[:, sources]
        assert np.array_equal(ours, expected)
        assert ends.pool_a.digests(sources) == ends.pool_b.digests(targets)
        assert ends.pool_a.digests([3]) == (xxhash.xxh3_64_intdigest(theirs[:, 3].tobytes()),)
        ends.a.close()
        ends.b.close()

    def test_a_run_may_span_blocks(self, ends: Ends) -> None:
        ends.read([ByteRun(2 * SIZE, 5 * SIZE, 3 * SIZE)])
        assert [int(block[0]) for block in ends.bytes_b[4:9]] == [0, known_bytes(2), known_bytes(3), known_bytes(4), 0]

    def test_a_run_may_be_any_piece_of_a_pool(self, ends: Ends) -> None:
        ends.read([ByteRun(SIZE + 5, 7, 100), ByteRun(9 * SIZE - 1, 500, 2)])
        flat = ends.bytes_b.reshape(-1)
        assert set(flat[7:107]) == {known_bytes(1)}
        assert list(flat[500:502]) == [known_bytes(8), known_bytes(9)]
        assert np.count_nonzero(flat) == 102

    def test_many_reads_at_once_come_back_once_each(self, ends: Ends) -> None:
        handles = [ends.b.start_read("a", blocks([(block, block)])) for block in range(32)]
        events = ends.poll_until(lambda so_far: len(so_far) >= 32)
        assert len(events) == 32
        assert set(events) == {ReadDone(handle) for handle in handles}
        assert np.array_equal(ends.bytes_b[:32], ends.bytes_a[:32])
        assert ends.b.poll() == []

    def test_a_read_that_ended_at_once_is_there_and_not_told_of_again(self, ends: Ends) -> None:
        ends.read(blocks([(0, 0)]))  # connects
        for block in range(1, 32):
            handle = ends.b.start_read("a", blocks([(block, block)]))
            if ends.b.try_complete(handle):
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
        deadline = time.monotonic() + 20.0
        while not (seen_a and seen_b):
            assert time.monotonic() < deadline
            seen_a += ends.a.poll()
            seen_b += ends.b.poll()
        assert (seen_a, seen_b) == ([Notification("b", b"hello")], [ReadDone(handle)])

    @pytest.mark.parametrize(
        "run",
        [
            ByteRun(NUM_BLOCKS * SIZE, 0, SIZE),
            ByteRun(0, NUM_BLOCKS * SIZE, SIZE),
            ByteRun(NUM_BLOCKS * SIZE - 1, 0, 2),
        ],
    )
    def test_a_read_outside_a_pool_is_refused(self, ends: Ends, run: ByteRun) -> None:
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


@pytest.mark.timeout(240)
def test_the_contract_holds_over_tcp() -> None:
    """UCX reads UCX_TLS once per process, so this takes another one."""
    kinds = ("nixl", "ucxx")
    for kind in kinds:
        real_transport(kind)
    which = f"({' or '.join(kinds)}) and (TestContract or owner) and not shared_memory"
    files = [__file__, str(ROOT / "tests/integration/test_transport_peers.py")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, *files],
        env=os.environ | {"UCX_TLS": "tcp,self"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    num_by_end = {end: int(num) for num, end in re.findall(r"(\d+) (passed|xfailed)", result.stdout)}
    assert sum(num_by_end.values()) == 40, result.stdout  # UCX may end an owner: `xfail_if_ucx_ended_it`


def test_nixl_listens_on_loopback_alone_where_all_peers_are_on_this_machine() -> None:
    """UCX asks nobody for credentials. On a machine without another network this shows nothing."""
    opening: Any = real_transport("nixl")

    def listening() -> set[str]:
        return {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}

    before = listening()
    both = Ends(lambda name: opening(name, is_local=True))
    assert listening() - before <= {LOOPBACK}
    both.read(blocks([(1, 1)]))
    both.a.close()
    both.b.close()


def test_an_address_with_the_metadata_of_another_peer_does_not_disconnect_that_peer() -> None:
    both = Ends(real_transport("nixl"))
    with pytest.raises(TransportError, match="the metadata of c is"):
        both.b.connect(replace(both.address_a, name="c"))
    both.read(blocks([(1, 1)]))
    both.b.disconnect("a")
    both.a.close()
    both.b.close()


def test_nixl_forgets_a_peer_whose_address_has_failed() -> None:
    both: Any = Ends(real_transport("nixl"))
    both.b.disconnect("a")
    with pytest.raises(TransportError, match="NIXL_ERR_NOT_FOUND"):
        both.b.connect(replace(both.address_a, num_blocks=1 << 20))  # more than is registered
    assert not both.b._agent.check_remote_metadata("a")
    both.b.connect(both.address_a)
    both.read(blocks([(1, 1)]))
    both.a.close()
    both.b.close()


def test_messages_of_unnamed_connections_leave_nothing_behind() -> None:
    """Each message has the tag of its connection, which the sender chooses."""
    both: Any = Ends(real_transport("ucxx"))
    connection = both.a._outgoing["b"]
    tag = connection.tag
    both.a.notify("b", b"known")
    for number in range(8):
        connection.tag = number
        both.a.notify("b", b"unnamed")
    connection.tag = tag
    both.a.notify("b", b"last")
    wanted = [Notification("a", b"known"), Notification("a", b"last")]
    assert both.poll_until(lambda events: len(events) == len(wanted)) == wanted
    assert [known.name for known in both.b._incoming.values()] == ["a"]
    both.a.close()
    both.b.close()


def test_ucxx_keeps_the_first_characters_of_a_name() -> None:
    """A peer without credentials sends it, and 1,024 of them are kept."""
    both: Any = Ends(real_transport("ucxx"))
    both.a.name = "x" * 100_000
    both.a.connect(both.address_b)
    both.a.notify("b", b"hello")
    assert both.poll_until(bool) == [Notification("x" * 256, b"hello")]
    both.a.close()
    both.b.close()


def test_one_poll_accepts_some_of_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = real_transport("ucxx")
    from kv_transfer.transports import ucxx_transport

    monkeypatch.setattr(ucxx_transport, "MAX_ACCEPTS", 1)
    both: Any = Ends(opening)
    both.read(blocks([(0, 0)]))
    late: list[Any] = [opening(name) for name in ("c", "d")]
    pools = [host_pool() for _ in late]
    for transport, (_, pool) in zip(late, pools, strict=True):
        transport.register(pool)
        transport.connect(both.address_b)
    while len(both.b._requests) < len(late):
        both.b._progress()
        for transport in late:
            transport.poll()
    both.b.poll()
    assert len(both.b._requests) == 1
    both.b.poll()
    assert not both.b._requests
    for transport in (*late, both.a, both.b):
        transport.close()


def test_connections_that_fail_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Any bytes that a stranger sends to the listener may be one."""
    transport: Any = real_transport("ucxx")("a")
    import ucxx._lib.libucxx as ucx

    class Failing:
        def create_endpoint_from_conn_request(self, *_: object) -> None:
            raise ucx.UCXError("Invalid parameter")

    listener, transport._listener = transport._listener, Failing()
    transport._requests.extend(range(10))
    transport._accept()
    transport._listener = listener
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4, 8]
    transport.close()


def test_a_message_above_the_limit_is_dropped_whatever_length_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = real_transport("ucxx")
    from kv_transfer.transports import ucxx_transport

    monkeypatch.setattr(ucxx_transport, "MAX_MESSAGE_BYTES", 1000)
    both: Any = Ends(opening)
    for num_bytes in (1001, 2 << 20, 1000):
        both.a.notify("b", bytes(num_bytes))
    assert both.poll_until(bool) == [Notification("a", bytes(1000))]
    both.a.close()
    both.b.close()


def test_a_forgotten_connection_keeps_the_memory_of_its_message_until_that_has_arrived() -> None:
    """A peer connects again while its last message arrives, and UCX writes on into the buffer."""
    both: Any = Ends(real_transport("ucxx"))
    both.a.notify("b", b"the first")
    both.poll_until(bool)
    ((tag, old),) = both.b._incoming.items()
    both.a.notify("b", bytes(1 << 20))
    while not old.receives:
        both.a.poll()
        both.b.poll()
    request, buffer = old.receives[0]
    assert not request.completed
    arriving = weakref.ref(buffer)
    del old, buffer
    both.b._forget_older(tag + 1, "a")
    assert arriving() is not None
    assert both.b._incoming.keys() == {tag}
    while arriving() is not None:
        both.a.poll()
        assert both.b.poll() == []
    assert request.completed
    assert not both.b._incoming
    both.a.close()
    both.b.close()


def test_a_connection_above_the_limit_is_closed_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX keeps each request that has no endpoint, and its peer would wait for the whole connect timeout."""
    opening = real_transport("ucxx")
    from kv_transfer.transports import ucxx_transport

    monkeypatch.setattr(ucxx_transport, "MAX_CONNECTIONS", 1)
    both: Any = Ends(opening)
    both.a.notify("b", b"the first")
    assert both.poll_until(bool) == [Notification("a", b"the first")]
    late: Any = opening("late")
    _, pool = host_pool()
    late.register(pool)
    late.connect(both.address_b)
    connection = late._outgoing["b"]
    while not connection.closed:
        both.b.poll()
        late.poll()
    assert "within" not in connection.closed
    assert not both.b._requests
    both.a.notify("b", b"another")
    assert both.poll_until(bool) == [Notification("a", b"another")]
    for transport in (late, both.a, both.b):
        transport.close()
