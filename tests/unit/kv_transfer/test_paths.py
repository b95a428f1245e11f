"""Paths to peers: the machine of a reader. The test acts as its agent, its peer and its clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.config import TransferConfig
from core.handoff import AbortReason, AgentAddress, HandoffMessage, Location, OfferedBlocks, Ping, Ready
from core.kv_layout import KVLayout
from core.machine import Tick
from core.paths import Lane, PathState, PeerJoined, PeerLeft
from core.scheduling.block_pool import BlockPool
from kv_transfer.protocol import events
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.paths import MAX_PATHS, NUM_PINGS, RETRY_S
from tests.support.deadlines import deadlines_until
from tests.support.transcripts import Replay, transcripts_of
from tests.support.transfer_words import seen_transfer
from tests.unit.kv_transfer.transfer_pair import address

CONFIG = TransferConfig(connect_timeout_s=1.0, slow_path_share=0.25)
HERE = Location("one machine", memory_bytes_per_s=8e9)
GPUS = {"two": Location("one machine", on_gpu=True), "one": Location("one machine", True, 5e11, gpu="GPU-1")}
BIG = KVLayout("m", "float32", num_layers=32, num_kv_heads=8, block_size=16, head_dim=64)  # 2 MiB a block


class Reader(Replay):
    """Words about the peer `owner`, and a clock. A PING that nobody answers is repeated after 0.2 s."""

    def __init__(self) -> None:
        self.gpus("")

    def gpus(self, which: str) -> list[Any]:
        """A new reader. Its pool and that of the owner are on two GPUs, on one, or in host memory."""
        self.now, self.pool, self.location = 100.0, BlockPool(32), GPUS.get(which, HERE)
        self.machine = TransferMachine(CONFIG, self.pool, self.agent("reader"))
        self.num_hand_offs = 0
        self.ping, self.probes_in_flight = 0, list[events.ProbePath]()
        return []

    def agent(self, name: str = "owner", incarnation: int = 7, layout: KVLayout = BIG) -> AgentAddress:
        found = address(name, incarnation, layout=layout)
        return replace(found, probe_bytes=4_194_304, location=self.location)

    def seen(self, action: Any) -> str:
        return seen_transfer(action)

    def check(self) -> None:
        self.machine.check()

    def post(self, event: events.TransferEvent) -> list[Any]:
        return self.take(self.machine.handle(event, self.now))

    def take(self, actions: list[Any]) -> list[Any]:
        self.machine.check()
        for action in actions:
            if isinstance(action, events.SendMessage) and isinstance(action.message, Ping):
                self.ping = action.message.counter
            if isinstance(action, events.ProbePath):
                assert action.timeout_s == action.num_bytes / CONFIG.min_bytes_per_s + CONFIG.read_grace_s
                self.probes_in_flight.append(action)
        return actions

    # ---- words

    def join(self, name: str = "owner", owner: int = 1, **changes: Any) -> list[Any]:
        return self.post(PeerJoined(self.agent(name, layout=replace(BIG, **changes)), bool(owner)))

    def left(self) -> list[Any]:
        return self.post(PeerLeft("owner"))

    def lost(self, detail: str) -> list[Any]:
        return self.post(events.PeerLost("owner", detail))

    def receive(self, message: HandoffMessage, sender: str = "owner") -> list[Any]:
        return self.post(events.MessageReceived(sender, message))

    def pinged(self) -> list[Any]:
        return self.receive(Ping(7, 1, None))

    def answer(self, after_s: float = 0.0002) -> list[Any]:
        self.now += after_s
        return self.receive(Ping(7, 1000 + self.ping, ack=self.ping))

    def answers(self) -> list[Any]:
        """Of all PINGs of a measurement; what the last one brings."""
        return [self.answer() for _ in range(NUM_PINGS)][-1]

    def probes(self, bytes_per_s: float, seen: str = "unknown") -> list[Any]:
        """Every probe ends, and those that follow. The sizes of these, and what the last one brings."""
        sizes, actions = [], []
        while self.probes_in_flight:
            size = self.probes_in_flight.pop().num_bytes
            actions = self.post(events.PathProbed("owner", size, size / bytes_per_s, Lane(seen)))
            sizes += [str(action.num_bytes) for action in actions if isinstance(action, events.ProbePath)]
        return [" ".join(sizes), *actions]

    def probe_fails(self, detail: str) -> list[Any]:
        return self.post(events.ProbeFailed("owner", detail))

    def probe_ends(self) -> list[Any]:
        return self.post(events.PathProbed("owner", 1, 1.0, Lane.TCP))

    def reserve(self) -> list[Any]:
        return self.take(self.machine.reserve_pull(99, self.agent(), self.now))

    def hand_off(self, bytes_per_s: float, blocks: int = 8, times: int = 1) -> list[Any]:
        """Pull so many blocks from the owner. The lane that each pull names, and a change of the path."""
        return [action for _ in range(times) for action in self._hand_off(bytes_per_s, tuple(range(blocks)))]

    def _hand_off(self, bytes_per_s: float, positions: tuple[int, ...]) -> list[Any]:
        self.num_hand_offs += 1
        ticket, targets = self.num_hand_offs, self.pool.reserve(len(positions))
        assert targets is not None
        self.take(self.machine.reserve_pull(ticket, self.agent(), self.now))
        (send,) = self.take(self.machine.puller.start(ticket, positions, self.now))
        self.take(self.machine.puller.add_targets(ticket, dict(enumerate(targets)), self.now))
        offered = OfferedBlocks(positions, positions, (0,) * len(positions))
        ready = Ready(ticket, 7, 10_000 + ticket, send.message.counter, 0, offered, last=True, token_ids=(1,))
        (read,) = [action for action in self.receive(ready) if isinstance(action, events.StartRead)]
        actions = self.post(events.ReadFinished(read.read_id, (), len(positions) * BIG.block_bytes / bytes_per_s))
        self.pool.cancel_reservation(targets)
        (done,) = [action for action in actions if isinstance(action, events.PullCompleted)]
        return [f"over {done.stats.lane or 'no lane'}", *(a for a in actions if isinstance(a, events.LogPath))]

    def tick(self) -> list[Any]:
        return self.post(Tick())

    def wait(self, seconds: float) -> list[Any]:
        end, actions = self.now + seconds, []
        for due in deadlines_until(end, self.machine.next_deadline):
            self.now = max(self.now, due)
            actions += self.tick()
        self.now = end
        return actions

    # ---- questions

    def path(self) -> list[str]:
        return [str(path) for path in self.machine.paths if path.peer == "owner"]

    def deadline(self) -> list[str]:
        deadline = self.machine.next_deadline()
        return [] if deadline is None else [f"in {deadline - self.now:.3g}"]

    def dropped(self) -> list[str]:
        return [f"{why.value} {count}" for why, count in self.machine.counters.dropped.items()]


JOINED = """
  join                -> connect owner; ping
"""

MEASURED = (
    JOINED
    + """
  answers             -> probe owner 65536 bytes
  probes 6e9          -> 262144 1048576 4194304 4194304 4194304; path owner fine
"""
)

test_measurements = transcripts_of(
    Reader,
    """
the shortest round trip counts
  answer 0.02           -> ping
  answer 0.0003         -> ping
  answer 0.0001         -> ping
  answer 0.0004         -> probe owner 65536 bytes
  path                  -> connecting: unknown, 100 us there and back

a slow path is logged once and measured again after a pause and not by large probes
  answers               -> probe owner 65536 bytes
  probes 1e6            -> 65536 65536; path owner slow
  wait 9
  wait 1.1              -> ping
  answers               -> probe owner 65536 bytes
  probes 1e6            -> 65536 65536
  wait 9
  wait 1.1              -> ping
  answers               -> probe owner 65536 bytes
  probes 6e9            -> 262144 1048576 4194304 4194304 4194304; path owner fine

tcp between gpus is a fallback whatever its speed
  gpus two
  join                  -> connect owner; ping
  answers               -> probe owner 65536 bytes
  probes 20e9 TCP       -> 262144 1048576 4194304 4194304 4194304; path owner fallback
  path                  -> fallback: TCP, 20 GB/s, 200 us there and back

a peer that answers no ping is unreachable after the connect timeout and tried again and found
  wait 0.9              -> ping; ping; ping; ping
  path                  -> connecting: unknown, 0 us there and back
  wait 0.2              -> disconnect owner; path owner unreachable
  path                  -> unreachable: no PING was answered
  wait 9.9              -> connect owner; ping
  answers               -> probe owner 65536 bytes
  probes 6e9            -> 262144 1048576 4194304 4194304 4194304; path owner fine

an unreachable peer that is announced again is tried at once
  lost reset            -> path owner unreachable
  path                  -> unreachable: reset
  join                  -> connect owner; ping

a peer that a transfer needs is left to the heartbeats
  reserve
  wait 1.5              -> ping; ping; ping; ping
  path                  -> connecting: unknown, 0 us there and back

no probe runs while a pull does
  reserve
  answers
  deadline              -> in 0.5
  wait 2                -> heartbeat 99: ready 0

a probe that fails makes a slow path that says why
  answers               -> probe owner 65536 bytes
  probe_fails cancelled -> path owner slow
  path                  -> slow: a probe failed: cancelled
""",
    JOINED,
)

test_fine_paths = transcripts_of(
    Reader,
    """
a fast path is probed with more and more bytes
  path                  -> fine: shared memory, 6 GB/s of 8, 200 us there and back
  deadline

one slow hand-off does not make a path slow and three do
  hand_off 1e9 times=2  -> over shared memory; over shared memory
  hand_off 1e9          -> over shared memory; path owner slow
  hand_off 5e9          -> over shared memory; path owner fine

a hand-off within a gpu counts if its copy takes long enough to be measured
  gpus one
  join                  -> connect owner; ping
  answers               -> probe owner 65536 bytes
  probes 4e11           -> 262144 1048576 4194304 4194304 4194304; path owner fine
  # 32 MiB: mostly the start of the copy
  hand_off 1e11 blocks=16 times=3 -> over cuda_ipc; over cuda_ipc; over cuda_ipc
  hand_off 1e11 blocks=32 times=3 -> over cuda_ipc; over cuda_ipc; over cuda_ipc; path owner slow

a small hand-off says nothing about the speed
  hand_off 1e6 blocks=1 times=3 -> over shared memory; over shared memory; over shared memory
  path                  -> fine: shared memory, 6 GB/s of 8, 200 us there and back

a path is reported anew only when it changes
  path                  -> fine: shared memory, 6 GB/s of 8, 200 us there and back
  hand_off 5e9 times=3  -> over shared memory; over shared memory; over shared memory
  path                  -> fine: shared memory, 6 GB/s of 8, 200 us there and back
  hand_off 3e9 times=3  -> over shared memory; over shared memory; over shared memory
  path                  -> fine: shared memory, 3 GB/s of 8, 200 us there and back

a worker that left is disconnected and its path forgotten
  left                  -> disconnect owner
  probe_ends
  probe_fails cancelled
  path
  deadline
  join                  -> connect owner; ping
""",
    MEASURED,
)

test_others = transcripts_of(
    Reader,
    """
a path that was not announced is measured after its first hand-off
  hand_off 5e9          -> over no lane
  path                  -> connecting: unknown, 5 GB/s of 8, 0 us there and back
  tick                  -> ping
  answers               -> probe owner 65536 bytes
  probes 6e9            -> 262144 1048576 4194304 4194304 4194304; path owner fine
  path                  -> fine: shared memory, 6 GB/s of 8, 200 us there and back

another model is refused by the names of the fields and told once
  join model=other num_layers=3 -> path owner refused
  join model=other num_layers=3
  path                  -> refused: KV layouts differ in model: 'm' here, 'other' there

the worker that is read from connects and answers and measures nothing
  join owner=0          -> connect owner
  pinged                -> ping answered
  deadline
  path

a ping of an unknown peer is not answered
  pinged
  dropped
""",
)


def measured() -> Reader:
    reader = Reader()
    reader.play(MEASURED)
    return reader


def connected(actions: list[Any]) -> list[AgentAddress]:
    return [action.peer for action in actions if isinstance(action, events.Connect)]


@pytest.mark.parametrize("joins", [True, False])
def test_the_path_to_another_incarnation_of_a_peer_is_another_path(joins: bool) -> None:
    """The name of an agent holds its incarnation, but a router may be faulty: no worker ends for that."""
    reader = measured()
    other = reader.agent(incarnation=8)
    if joins:
        actions = reader.post(PeerJoined(other, True))
    else:
        actions = reader.take(reader.machine.reserve_pull(1, other, reader.now))
        reader.take(reader.machine.puller.cancel(1, AbortReason.CANCELLED, reader.now))
    assert connected(actions) == [other]
    reader.wait(2 * RETRY_S)
    assert connected(reader.join()) == [reader.agent()]


def test_paths_are_bounded_and_a_fine_one_makes_room() -> None:
    reader = measured()
    for number in range(MAX_PATHS - 1):
        reader.join(f"owner-{number}")
    assert len(reader.machine.paths) == MAX_PATHS
    reader.join("one more")
    names = {path.peer for path in reader.machine.paths}
    assert (len(names), "owner" in names, "one more" in names) == (MAX_PATHS, False, True)
    reader.join("too many")
    assert len(reader.machine.paths) == MAX_PATHS, "no other path is fine"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fine_path_that_had_to_leave_is_measured_again_only_if_its_peer_was_lost(is_lost: bool) -> None:
    reader = measured()
    for number in range(MAX_PATHS):
        reader.join(f"owner-{number}")
    assert not reader.path()
    if is_lost:
        reader.lost("killed")
    reader.post(PeerLeft("owner-0"))
    pinged = reader.ping
    reader.hand_off(6e9)
    (path,) = [path for path in reader.machine.paths if path.peer == "owner"]
    assert path.state is (PathState.CONNECTING if is_lost else PathState.FINE)
    assert is_lost or reader.ping == pinged
