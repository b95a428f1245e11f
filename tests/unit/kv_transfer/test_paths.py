"""Paths to peers: the machine of a reader. The test acts as its agent, its peer and its clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from core.config import TransferConfig
from core.handoff import AbortReason, AgentAddress, HandoffMessage, Location, OfferedBlocks, Ping, Ready, Want
from core.kv_layout import KVLayout
from core.machine import Tick
from core.paths import Lane, PathState, PathStatus, PeerJoined, PeerLeft
from core.scheduling.block_pool import BlockPool
from kv_transfer.protocol.events import (
    Connect,
    Disconnect,
    LogPath,
    MessageReceived,
    PathProbed,
    PeerLost,
    ProbeFailed,
    ProbePath,
    PullCompleted,
    ReadFinished,
    SendMessage,
    StartRead,
    TransferAction,
    TransferEvent,
)
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.paths import FIRST_PROBE_BYTES, MAX_PATHS, NUM_PINGS, NUM_SPEEDS, RETRY_S
from tests.support.deadlines import deadlines_until
from tests.unit.kv_transfer.transfer_pair import address

CONFIG = TransferConfig(connect_timeout_s=5.0, slow_path_share=0.25)
HERE = Location("one machine", memory_bytes_per_s=8e9)
ON_A_GPU = Location("one machine", on_gpu=True)
PROBE_BYTES = 4_194_304

BIG = KVLayout("m", "float32", num_layers=32, num_kv_heads=8, block_size=16, head_dim=64)  # 2 MiB a block

A = TypeVar("A")


def agent(name: str, location: Location = HERE, layout: KVLayout = BIG) -> AgentAddress:
    return replace(address(name, 7, layout=layout), probe_bytes=PROBE_BYTES, location=location)


class Reader:
    def __init__(self, location: Location = HERE) -> None:
        self.now = 100.0
        self.machine_pool = BlockPool(32)
        self.machine = TransferMachine(CONFIG, self.machine_pool, agent("reader", location))
        self.num_hand_offs = 0
        self.actions: list[Any] = []  # TransferAction

    def post(self, event: TransferEvent) -> None:
        self.take(self.machine.handle(event, self.now))

    def take(self, actions: list[TransferAction]) -> None:
        self.machine.check()
        self.actions += actions

    def of(self, kind: type[A]) -> list[A]:
        """Take the actions of this kind since the last call."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def join(self, peer: AgentAddress, is_owner: bool = True) -> None:
        self.post(PeerJoined(peer, is_owner))

    def hand_off(self, bytes_per_s: float, num_blocks: int = 8) -> None:
        """Hand `num_blocks` off from the owner; the read runs at `bytes_per_s`."""
        self.num_hand_offs += 1
        ticket, owner, blocks = self.num_hand_offs, agent("owner"), tuple(range(num_blocks))
        targets = self.machine_pool.reserve(num_blocks)
        assert targets is not None
        self.take(self.machine.reserve_pull(ticket, owner, self.now))
        self.take(self.machine.puller.start(ticket, range(num_blocks), self.now))
        self.take(self.machine.puller.add_targets(ticket, dict(enumerate(targets)), self.now))
        (want,) = [send.message for send in self.of(SendMessage) if isinstance(send.message, Want)]
        offered = OfferedBlocks(blocks, blocks, (0,) * num_blocks)
        self.receive(Ready(ticket, 7, 10_000 + ticket, want.counter, 0, offered, last=True, token_ids=(1,)))
        (read,) = self.of(StartRead)
        self.post(ReadFinished(read.read_id, (), num_blocks * BIG.block_bytes / bytes_per_s))
        self.machine_pool.cancel_reservation(targets)

    def pings(self) -> list[Ping]:
        return [send.message for send in self.of(SendMessage) if isinstance(send.message, Ping)]

    def receive(self, message: HandoffMessage, sender: str = "owner") -> None:
        self.post(MessageReceived(sender, message))

    def answer(self, after_s: float = 0.0002) -> None:
        (ping,) = self.pings()
        self.now += after_s
        self.receive(Ping(7, 1000 + ping.counter, ack=ping.counter))

    def answer_all(self) -> None:
        for _ in range(NUM_PINGS):
            self.answer()

    def probe_at(self, bytes_per_s: float, seen: Lane = Lane.UNKNOWN) -> list[int]:
        """Run every probe at `bytes_per_s`. Returns the sizes of the probes."""
        sizes = []
        while probes := self.of(ProbePath):
            (probe,) = probes
            sizes.append(probe.num_bytes)
            assert probe.timeout_s == pytest.approx(probe.num_bytes / CONFIG.min_bytes_per_s + CONFIG.read_grace_s)
            self.post(PathProbed(probe.peer, probe.num_bytes, probe.num_bytes / bytes_per_s, seen))
        return sizes

    def tick(self) -> None:
        self.post(Tick())

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for due in deadlines_until(end, self.machine.next_deadline):
            self.now = max(self.now, due)
            self.tick()
        self.now = end

    def path(self) -> PathStatus:
        """To the owner."""
        (path,) = [path for path in self.machine.paths if path.peer == "owner"]
        return path

    def logged(self) -> list[PathState]:
        return [log.path.state for log in self.of(LogPath)]


def measured(bytes_per_s: float, seen: Lane = Lane.UNKNOWN, location: Location = HERE) -> Reader:
    reader = Reader(location)
    reader.join(agent("owner", location))
    reader.answer_all()
    reader.probe_at(bytes_per_s, seen)
    return reader


@pytest.mark.parametrize("joins", [True, False])
def test_the_path_to_another_incarnation_of_a_peer_is_another_path(joins: bool) -> None:
    """The name of an agent holds its incarnation, but a router may be faulty: no worker ends for that."""
    reader, other = measured(4e9), replace(agent("owner"), incarnation=8)
    reader.of(Connect)
    if joins:
        reader.join(other)
    else:
        reader.take(reader.machine.reserve_pull(1, other, reader.now))
        reader.take(reader.machine.puller.cancel(1, AbortReason.CANCELLED, reader.now))
    assert reader.of(Connect) == [Connect(other)]
    reader.pass_time(2 * RETRY_S)
    reader.join(agent("owner"))
    assert reader.of(Connect)[-1] == Connect(agent("owner"))


def test_the_shortest_round_trip_counts() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    for after_s in [0.02, 0.0003, 0.0001, 0.0004]:
        reader.answer(after_s)
    assert abs(reader.path().latency_s - 0.0001) < 1e-9


def test_a_fast_path_is_probed_with_more_and_more_bytes() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    reader.answer_all()
    sizes = reader.probe_at(6e9)
    assert sizes == [FIRST_PROBE_BYTES, 4 * FIRST_PROBE_BYTES, 16 * FIRST_PROBE_BYTES] + [PROBE_BYTES] * NUM_SPEEDS
    path = reader.path()
    assert (path.state, path.lane, path.expected_bytes_per_s) == (PathState.FINE, Lane.SHARED_MEMORY, 8e9)
    assert abs(path.bytes_per_s - 6e9) < 1
    assert reader.logged() == [PathState.FINE]
    assert reader.machine.next_deadline() is None


def test_a_slow_path_is_logged_once_and_measured_again_after_a_pause_and_not_by_large_probes() -> None:
    reader = measured(1e6)
    assert reader.logged() == [PathState.SLOW]
    for bytes_per_s, num_probes in ((1e6, NUM_SPEEDS), (6e9, 3 + NUM_SPEEDS)):
        reader.pass_time(RETRY_S - 1)
        assert not reader.pings()
        reader.pass_time(1.1)
        reader.answer_all()
        assert len(reader.probe_at(bytes_per_s)) == num_probes
    assert reader.logged() == [PathState.FINE]


def test_tcp_between_gpus_is_a_fallback_whatever_its_speed() -> None:
    reader = measured(20e9, seen=Lane.TCP, location=ON_A_GPU)
    assert (reader.path().state, reader.path().lane) == (PathState.FALLBACK, Lane.TCP)
    assert reader.logged() == [PathState.FALLBACK]


def test_one_slow_hand_off_does_not_make_a_path_slow_and_three_do() -> None:
    reader = measured(6e9)
    reader.logged()
    for _ in range(2):
        reader.hand_off(1e9)
    assert reader.path().state is PathState.FINE
    reader.hand_off(1e9)
    assert [done.stats.lane for done in reader.of(PullCompleted)] == [Lane.SHARED_MEMORY.value] * 3
    assert reader.logged() == [PathState.SLOW]
    reader.hand_off(5e9)
    assert reader.logged() == [PathState.FINE]


def test_a_hand_off_within_a_gpu_counts_if_its_copy_takes_long_enough_to_be_measured() -> None:
    gpu = Location("one machine", on_gpu=True, memory_bytes_per_s=5e11, gpu="GPU-1")
    reader = measured(4e11, location=gpu)
    reader.logged()
    for _ in range(3):
        reader.hand_off(1e11, num_blocks=16)  # 32 MiB: mostly the start of the copy
    assert reader.path().state is PathState.FINE
    for _ in range(3):
        reader.hand_off(1e11, num_blocks=32)
    assert reader.logged() == [PathState.SLOW]


def test_a_small_hand_off_says_nothing_about_the_speed() -> None:
    reader = measured(6e9)
    for _ in range(3):
        reader.hand_off(1e6, num_blocks=1)
    assert reader.path().bytes_per_s == pytest.approx(6e9)


def test_a_path_is_reported_anew_only_when_it_changes() -> None:
    reader = measured(6e9)
    before = reader.path()
    for _ in range(3):
        reader.hand_off(5e9)
    assert reader.path() is before, "5 GB/s are near enough"
    for _ in range(3):
        reader.hand_off(3e9)
    assert reader.path().bytes_per_s == pytest.approx(3e9)


def test_a_path_that_was_not_announced_is_measured_after_its_first_hand_off() -> None:
    reader = Reader()
    reader.hand_off(5e9)
    assert reader.path().state is PathState.CONNECTING
    reader.tick()
    reader.answer_all()
    reader.probe_at(6e9)
    assert reader.path().lane is Lane.SHARED_MEMORY
    assert reader.logged() == [PathState.FINE]


def test_a_peer_that_answers_no_ping_is_unreachable_after_the_connect_timeout_and_tried_again_and_found() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    reader.pass_time(4.9)
    assert reader.path().state is PathState.CONNECTING
    assert len(reader.pings()) > 5, "a PING may be lost"
    reader.pass_time(0.2)
    assert (reader.path().state, reader.path().detail) == (PathState.UNREACHABLE, "no PING was answered")
    assert reader.of(Disconnect) == [Disconnect("owner")]
    reader.of(Connect)
    reader.pass_time(RETRY_S - 0.1)
    assert reader.of(Connect) == [Connect(agent("owner"))]
    reader.answer_all()
    reader.probe_at(6e9)
    assert reader.logged() == [PathState.UNREACHABLE, PathState.FINE]


def test_an_unreachable_peer_that_is_announced_again_is_tried_at_once() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    reader.post(PeerLost("owner", "connection reset"))
    assert str(reader.path()) == "unreachable: connection reset"
    reader.of(Connect)
    reader.join(agent("owner"))
    assert reader.of(Connect) == [Connect(agent("owner"))]


def test_a_peer_that_a_transfer_needs_is_left_to_the_heartbeats() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    reader.take(reader.machine.reserve_pull(1, agent("owner"), reader.now))
    reader.pass_time(6.0)
    assert reader.path().state is PathState.CONNECTING
    assert not reader.of(Disconnect)


def test_no_probe_runs_while_a_pull_does() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    pings = reader.of(SendMessage)
    reader.take(reader.machine.reserve_pull(1, agent("owner"), reader.now))
    reader.actions = [*pings]
    reader.answer_all()
    due = reader.machine.next_deadline()
    assert due is not None
    assert due > reader.now
    reader.pass_time(2.0)
    assert not reader.of(ProbePath)


def test_a_probe_that_fails_makes_a_slow_path_that_says_why() -> None:
    reader = Reader()
    reader.join(agent("owner"))
    reader.answer_all()
    reader.post(ProbeFailed("owner", "65536 bytes in 2.1 s: cancelled"))
    assert str(reader.path()) == "slow: a probe failed: 65536 bytes in 2.1 s: cancelled"
    assert reader.path().bytes_per_s == 0.0


def test_another_model_is_refused_by_the_names_of_the_fields_and_told_once() -> None:
    reader = Reader()
    for _ in range(3):
        reader.join(agent("owner", layout=replace(BIG, model="other", num_layers=3)))
    assert not reader.of(Connect)
    detail = reader.path().detail
    assert detail == "KV layouts differ in model: 'm' here, 'other' there"
    assert reader.logged() == [PathState.REFUSED]


def test_the_worker_that_is_read_from_connects_and_answers_and_measures_nothing() -> None:
    owner = Reader()
    owner.join(agent("peer"), is_owner=False)
    assert owner.of(Connect) == [Connect(agent("peer"))]
    owner.receive(Ping(7, 1, None), sender="peer")
    assert [ping.ack for ping in owner.pings()] == [1]
    assert owner.machine.next_deadline() is None
    assert owner.machine.paths == ()


def test_a_ping_of_an_unknown_peer_is_not_answered() -> None:
    owner = Reader()
    owner.receive(Ping(7, 1, None), sender="not announced yet")
    assert not owner.actions
    assert not owner.machine.counters.dropped


def test_a_worker_that_left_is_disconnected_and_its_path_forgotten() -> None:
    reader = measured(6e9)
    reader.post(PeerLeft("owner"))
    assert reader.of(Disconnect) == [Disconnect("owner")]
    for late in (PathProbed("owner", 1, 1.0, Lane.TCP), ProbeFailed("owner", "cancelled")):
        reader.post(late)
    assert reader.machine.paths == ()
    assert reader.machine.next_deadline() is None
    reader.of(Connect)
    reader.join(agent("owner"))
    assert reader.of(Connect) == [Connect(agent("owner"))]


def test_paths_are_bounded_and_a_fine_one_makes_room() -> None:
    reader = measured(6e9)
    for number in range(MAX_PATHS - 1):
        reader.join(agent(f"owner-{number}"))
    assert len(reader.machine.paths) == MAX_PATHS
    reader.join(agent("one more"))
    names = {path.peer for path in reader.machine.paths}
    assert (len(names), "owner" in names, "one more" in names) == (MAX_PATHS, False, True)
    reader.join(agent("too many"))
    assert len(reader.machine.paths) == MAX_PATHS, "no other path is fine"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fine_path_that_had_to_leave_is_measured_again_only_if_its_peer_was_lost(is_lost: bool) -> None:
    reader = measured(6e9)
    for number in range(MAX_PATHS):
        reader.join(agent(f"owner-{number}"))
    assert "owner" not in {path.peer for path in reader.machine.paths}
    if is_lost:
        reader.post(PeerLost("owner", "killed"))
    reader.post(PeerLeft("owner-0"))
    reader.of(ProbePath)
    reader.pings()
    reader.hand_off(6e9)
    assert reader.path().state is (PathState.CONNECTING if is_lost else PathState.FINE)
    assert is_lost or (reader.of(ProbePath), reader.pings()) == ([], [])
