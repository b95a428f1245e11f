"""Paths to introduced peers, from the reader's machine: the test is its agent, its peer and its clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from core.block_pool import BlockPool
from core.config import TransferConfig
from core.handoff import AbortReason, AgentAddress, HandoffMessage, Location, Ping
from core.kv_layout import KVLayout
from core.machine import Tick
from core.paths import Lane, PathState, PathStatus, PeerDismissed, PeerIntroduced
from kv_transfer.events import (
    Connect,
    Disconnect,
    MessageReceived,
    PathProbed,
    PathSeen,
    PeerLost,
    ProbeFailed,
    ProbePath,
    SendMessage,
    TellPath,
    TransferAction,
    TransferEvent,
)
from kv_transfer.machine import TransferMachine
from kv_transfer.paths import FIRST_PROBE_BYTES, MAX_PAUSE_S, NUM_PINGS, NUM_PROBES, PAUSE_S
from kv_transfer.peers import MAX_IDLE_PEERS
from tests.unit.kv_transfer.transfer_pair import LAYOUT, address

CONFIG = TransferConfig(connect_timeout_s=5.0, slow_path_share=0.25)
HERE = Location("one machine", memory_bytes_per_s=8e9)
ON_A_GPU = Location("one machine", on_gpu=True)
PROBE_BYTES = 4_194_304

A = TypeVar("A")


def agent(name: str, location: Location = HERE, layout: KVLayout = LAYOUT) -> AgentAddress:
    return replace(address(name, 7, layout=layout), probe_bytes=PROBE_BYTES, location=location)


class Reader:
    def __init__(self, location: Location = HERE) -> None:
        self.now = 100.0
        self.machine = TransferMachine(CONFIG, BlockPool(32), agent("reader", location))
        self.actions: list[Any] = []  # TransferAction

    def post(self, event: TransferEvent) -> None:
        self.take(self.machine.handle(event, self.now))

    def take(self, actions: list[TransferAction]) -> None:
        self.machine.check()
        self.actions += actions

    def of(self, kind: type[A]) -> list[A]:
        """What it has decided of this kind since the last look; the rest stays."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def introduce(self, peer: AgentAddress, is_owner: bool = True) -> None:
        self.post(PeerIntroduced(peer, is_owner))

    def pings(self) -> list[Ping]:
        return [send.message for send in self.of(SendMessage) if isinstance(send.message, Ping)]

    def hear(self, message: HandoffMessage, sender: str = "owner") -> None:
        self.post(MessageReceived(sender, message))

    def answer(self, after_s: float = 0.0002) -> None:
        (ping,) = self.pings()
        self.now += after_s
        self.hear(Ping(7, 1000 + ping.counter, ack=ping.counter))

    def answer_all(self) -> None:
        for _ in range(NUM_PINGS):
            self.answer()
        self.tick()

    def probe_at(self, bytes_per_s: float, seen: Lane = Lane.UNKNOWN) -> list[int]:
        """Every probe runs at that speed; returns their sizes."""
        sizes = []
        while probes := self.of(ProbePath):
            (probe,) = probes
            sizes.append(probe.num_bytes)
            self.post(PathProbed(probe.peer, probe.num_bytes, probe.num_bytes / bytes_per_s, seen))
        return sizes

    def tick(self) -> None:
        self.post(Tick())

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.tick()
        self.now = end

    def path(self) -> PathStatus:
        (path,) = self.machine.paths
        return path

    def told(self) -> list[PathState]:
        return [tell.path.state for tell in self.of(TellPath)]


def measured(bytes_per_s: float, seen: Lane = Lane.UNKNOWN, location: Location = HERE) -> Reader:
    reader = Reader(location)
    reader.introduce(agent("owner", location))
    reader.answer_all()
    reader.probe_at(bytes_per_s, seen)
    return reader


def test_an_introduced_owner_is_connected_to_and_asked_for_a_sign_of_life() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    assert reader.of(Connect) == [Connect(agent("owner"))]
    assert [ping.ack for ping in reader.pings()] == [None]
    assert reader.path().state is PathState.CONNECTING


def test_the_shortest_round_trip_counts() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    for after_s in [0.02, 0.0003, 0.0001, 0.0004]:
        reader.answer(after_s)
    assert abs(reader.path().latency_s - 0.0001) < 1e-9


def test_a_fast_path_is_probed_with_more_and_more_bytes() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.answer_all()
    sizes = reader.probe_at(6e9)
    assert sizes == [FIRST_PROBE_BYTES, 4 * FIRST_PROBE_BYTES, 16 * FIRST_PROBE_BYTES] + [PROBE_BYTES] * NUM_PROBES
    path = reader.path()
    assert (path.state, path.lane, path.expected_bytes_per_s) == (PathState.FINE, Lane.SHARED_MEMORY, 8e9)
    assert abs(path.bytes_per_s - 6e9) < 1
    assert reader.told() == [PathState.FINE]
    assert reader.machine.next_deadline() is None


def test_a_slow_path_is_not_held_up_by_large_probes() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.answer_all()
    assert reader.probe_at(1e6) == [FIRST_PROBE_BYTES] * NUM_PROBES
    assert reader.path().state is PathState.SLOW
    assert reader.told() == [PathState.SLOW]


def test_what_is_slow_is_told_once_and_looked_at_again_after_a_pause_that_doubles() -> None:
    reader = measured(1e6)
    assert reader.told() == [PathState.SLOW]
    reader.pass_time(PAUSE_S + 0.1)
    reader.answer_all()
    assert reader.probe_at(1e6)
    reader.pass_time(PAUSE_S + 0.1)
    assert not reader.pings()
    reader.pass_time(PAUSE_S)
    reader.answer_all()
    assert reader.probe_at(6e9)
    assert reader.told() == [PathState.FINE]


def test_tcp_between_gpus_is_a_fallback_whatever_its_speed() -> None:
    reader = measured(20e9, seen=Lane.TCP, location=ON_A_GPU)
    assert (reader.path().state, reader.path().lane) == (PathState.FALLBACK, Lane.TCP)
    assert reader.told() == [PathState.FALLBACK]


def test_gpus_of_one_machine_without_tcp_are_fine() -> None:
    reader = measured(20e9, location=ON_A_GPU)
    assert (reader.path().state, reader.path().lane) == (PathState.FINE, Lane.CUDA_IPC)


def test_one_slow_moment_of_the_transfers_is_not_a_slow_path_and_three_are() -> None:
    reader = measured(6e9)
    reader.told()
    reader.post(PathSeen("owner", 1e9))
    reader.post(PathSeen("owner", 1e9))
    assert reader.path().state is PathState.FINE
    reader.post(PathSeen("owner", 1e9))
    assert reader.told() == [PathState.SLOW]
    reader.post(PathSeen("owner", 5e9))
    assert reader.told() == [PathState.FINE]


def test_a_peer_without_a_sign_of_life_is_unreachable_after_the_connect_timeout() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.pass_time(4.9)
    assert reader.path().state is PathState.CONNECTING
    assert len(reader.pings()) == 5, "a PING may be lost"
    reader.pass_time(0.2)
    assert (reader.path().state, reader.path().detail) == (PathState.UNREACHABLE, "it gives no sign of life")
    assert reader.of(Disconnect) == [Disconnect("owner")]
    assert reader.told() == [PathState.UNREACHABLE]


def test_an_unreachable_peer_is_tried_again_and_found() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.pass_time(5.1)
    reader.pings()
    reader.of(Connect)
    reader.pass_time(PAUSE_S)
    assert reader.of(Connect) == [Connect(agent("owner"))]
    reader.answer_all()
    reader.probe_at(6e9)
    assert reader.told() == [PathState.UNREACHABLE, PathState.FINE]


def test_a_second_introduction_tries_an_unreachable_peer_at_once() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.post(PeerLost("owner", "connection reset"))
    assert str(reader.path()) == "unreachable: connection reset"
    reader.of(Connect)
    reader.introduce(agent("owner"))
    reader.tick()
    assert reader.of(Connect) == [Connect(agent("owner"))]


def test_a_peer_that_a_transfer_needs_is_left_to_the_heartbeats() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.take(reader.machine.reserve_pull(1, agent("owner"), reader.now))
    reader.pass_time(6.0)
    assert reader.path().state is PathState.CONNECTING
    assert not reader.of(Disconnect)


def test_a_probe_gives_way_to_a_pull() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.take(reader.machine.reserve_pull(1, agent("owner"), reader.now))
    reader.of(SendMessage)
    reader.post(PeerDismissed("owner"))
    reader.introduce(agent("owner"))
    reader.answer_all()
    reader.pass_time(2.0)
    assert not reader.of(ProbePath)


def test_a_probe_that_fails_makes_a_slow_path_that_says_why() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.answer_all()
    reader.post(ProbeFailed("owner", "65536 bytes in 2.1 s: cancelled"))
    assert str(reader.path()) == "slow: a probe failed: 65536 bytes in 2.1 s: cancelled"


def test_another_model_is_refused_by_the_names_of_the_fields_and_told_once() -> None:
    reader = Reader()
    for _ in range(3):
        reader.introduce(agent("owner", layout=replace(LAYOUT, model="other", num_layers=3)))
    assert not reader.of(Connect)
    detail = reader.path().detail
    assert detail == "KV layouts differ in model: 'm' here, 'other' there"
    assert reader.told() == [PathState.REFUSED]


def test_who_is_read_from_answers_and_measures_nothing() -> None:
    owner = Reader()
    owner.introduce(agent("peer"), is_owner=False)
    owner.pings()
    owner.hear(Ping(7, 1, None), sender="peer")
    assert [ping.ack for ping in owner.pings()] == [1, None]
    owner.pass_time(0.5)
    assert not owner.of(ProbePath)
    assert owner.machine.paths == ()


def owner_of(*names: str) -> Reader:
    """A worker whose readers have all given a sign of life."""
    owner = Reader()
    for name in names:
        owner.introduce(agent(name), is_owner=False)
        answer_as(owner, name)
    owner.told()
    return owner


def answer_as(owner: Reader, name: str) -> None:
    for send in owner.of(SendMessage):
        if send.peer == name and isinstance(send.message, Ping):
            owner.hear(Ping(7, 1000 + send.message.counter, ack=send.message.counter), sender=name)


def test_a_reader_that_died_unseen_is_noticed_when_another_is_introduced_and_leaves_its_place() -> None:
    owner = owner_of("dead")
    owner.pass_time(3600.0)
    assert not owner.machine.paths, "it has no reason to ask"
    owner.introduce(agent("new"), is_owner=False)
    owner.pass_time(5.1)
    assert "unreachable: it gives no sign of life" in [str(path) for path in owner.machine.paths if path.peer == "dead"]
    owner.post(PeerDismissed("dead"))
    assert "dead" not in owner.machine.paths_settled


def test_a_reader_that_lives_answers_and_nobody_hears_of_it() -> None:
    owner = owner_of("alive")
    for _ in range(2):  # known already, or new
        owner.introduce(agent("alive"), is_owner=False)
        answer_as(owner, "alive")
    owner.pass_time(60.0)
    assert owner.machine.paths == ()
    assert owner.machine.paths_settled == ["alive"]
    assert owner.machine.next_deadline() is None
    assert not owner.told()
    assert not owner.of(Disconnect)


def test_a_reader_that_was_let_go_for_another_s_sake_is_not_probed_but_waited_for() -> None:
    """Its connection went to peers that transfers needed; there is no room to ask it over."""
    owner = owner_of("idle")
    for number in range(MAX_IDLE_PEERS):
        owner.take(owner.machine.offer(number, agent(f"reader-{number}"), owner.now))
        owner.take(owner.machine.abort_offer(number, AbortReason.CANCELLED))
    assert owner.of(Disconnect) == [Disconnect("idle")]
    owner.introduce(agent("new"), is_owner=False)
    owner.pass_time(2 * MAX_PAUSE_S)
    assert not owner.of(ProbePath)
    assert owner.machine.paths == ()


def test_a_ping_of_a_stranger_is_not_answered_and_not_held_against_anybody() -> None:
    owner = Reader()
    owner.hear(Ping(7, 1, None), sender="not introduced yet")
    assert not owner.actions
    assert not owner.machine.counters.dropped


def test_a_ping_of_the_peer_shows_that_it_knows_us_by_now_and_is_asked_again_once() -> None:
    reader = Reader()
    reader.introduce(agent("owner"))
    reader.pings()
    for counter in (1, 2):
        reader.hear(Ping(7, counter, None))
    assert [ping.ack for ping in reader.pings()] == [1, None, 2]


def test_a_worker_that_left_is_let_go() -> None:
    reader = measured(6e9)
    reader.post(PeerDismissed("owner"))
    assert reader.of(Disconnect) == [Disconnect("owner")]
    assert reader.machine.paths == ()
    assert reader.machine.next_deadline() is None


def test_introductions_are_bounded_and_let_nobody_go() -> None:
    reader = Reader()
    for number in range(MAX_IDLE_PEERS + 10):
        reader.introduce(agent(f"owner-{number}"))
    assert len(reader.of(Connect)) == MAX_IDLE_PEERS
    assert len(reader.machine.paths) == MAX_IDLE_PEERS
    assert not reader.of(Disconnect)
