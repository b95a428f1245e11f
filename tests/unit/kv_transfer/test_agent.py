"""The agent's thread: the order of its actions, and its pauses: none while bytes or messages move, then longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AbortReason, AgentAddress, Heartbeat, HeartbeatEntry, Release
from core.kv_layout import KVLayout
from kv_transfer import agent as agent_module
from kv_transfer import path_probe
from kv_transfer.agent import FIRST_PAUSE_S, PAUSE_SHARE, SPIN_S, AgentIdentity, TransferAgent
from kv_transfer.protocol.events import (
    Connect,
    MessageReceived,
    PathProbed,
    PeerLost,
    ProbePath,
    ReadFailed,
    ReadFinished,
    ReadTimedOut,
    SendMessage,
    StartRead,
)
from kv_transfer.transports.poll_time import EMPTY_POLL_S, WARM_S, PollTime
from kv_transfer.transports.transport import PoolMemory, ReadDone, TransportEvent
from protos.handoff_codec import encode

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)
OWNER = AgentAddress("owner", 2, b"", 0, 4, LAYOUT, 12.0)


class CopyingWire:
    """A transport whose reads copy before their start returns, as over shared memory."""

    busy = False

    def __init__(self) -> None:
        self.done: list[str] = []

    def connect(self, peer: AgentAddress) -> None:
        self.done.append(f"connect {peer.name}")

    def disconnect(self, peer: str) -> None:
        self.done.append(f"disconnect {peer}")

    def notify(self, peer: str, payload: bytes) -> None:
        assert payload
        self.done.append(f"message to {peer}")

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert len(sources) == len(targets)
        self.done.append(f"read from {peer}")
        return len(self.done)

    def try_complete(self, handle: int) -> bool:
        return handle == len(self.done)

    def poll(self) -> list[TransportEvent]:
        assert len(self.done) < 100, "a read is not started"
        self.done.append("poll")
        return []


def test_a_heartbeat_waits_for_no_queued_read_and_a_close_for_all() -> None:
    """Each of 1,024 pulls may queue 4 reads of 128 MB. A pull whose heartbeats wait for them all loses its owner."""
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    config, wire = TransferConfig(verify_digests=False), CopyingWire()
    agent = TransferAgent(config, AgentIdentity("w", 1), pool, lambda _: cast(Any, wire), lambda _: None)
    reads = [StartRead(number, 7, "owner", (number,), (number,), 60.0) for number in range(3)]
    heartbeat = SendMessage("owner", Heartbeat(1, 1, None, (HeartbeatEntry(7, 0),)))
    agent.perform([Connect(OWNER), *reads, heartbeat], active=True)
    agent.close()  # performs what is queued
    agent._run_until_closed(cast(Any, wire))
    read = ["read from owner", "poll"]
    assert wire.done == ["connect owner", "message to owner", *read, *read, *read]


def test_an_agent_whose_thread_hangs_takes_a_bounded_number_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "MAX_COMMANDS", 4)
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), cast(Any, Mock()), cast(Any, None), lambda _: None)
    agent.perform([Connect(OWNER)] * 4, active=True)  # its thread takes none
    with pytest.raises(TransportError, match="5 actions wait for the transfer agent, more than 4"):
        agent.perform([Connect(OWNER)], active=True)


@pytest.mark.parametrize(("block_size", "pieces"), [(8, ()), (4, (0,))])
def test_a_peer_with_another_layout_is_lost_and_ends_no_agent(block_size: int, pieces: tuple[int, ...]) -> None:
    """A router has named two layouts for it. nixl ends with an exception of its own at blocks of another size."""
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    events: list[Any] = []
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), pool, lambda _: cast(Any, wire), events.extend)
    wire = CopyingWire()
    odd = replace(OWNER, layout=replace(LAYOUT, block_size=block_size))
    agent.perform([Connect(odd), StartRead(1, 7, "owner", (1,), (1,), 60.0, pieces)], active=True)
    agent.close()
    agent._run_until_closed(cast(Any, wire))
    detail = "connected to owner with another KV layout"
    assert events == [ReadFailed(1, AbortReason.PEER_LOST, detail), PeerLost("owner", detail)]
    assert wire.done == ["connect owner", "disconnect owner", "poll"]


def test_a_message_of_a_sender_with_a_longer_name_than_any_agent_has_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), cast(Any, Mock()), cast(Any, None), lambda _: None)
    for num_chars in (256, 257, 1 << 20):
        agent._receive(cast(Any, None), "x" * num_chars, encode(Release(7, 1, 1, None)))
    assert [len(event.peer) for event in agent._events if isinstance(event, MessageReceived)] == [256]
    assert agent.num_malformed == 2
    assert len(caplog.text) < 2000


CONFIG = TransferConfig(idle_poll_interval_s=0.02, active_poll_interval_s=0.001)
ROUND_S = 0.00002  # of one poll, in this test


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Wire:
    """A transport that is busy at the times in `busy_at`, for one poll each."""

    def __init__(self, clock: Clock, busy_at: tuple[float, ...] = ()) -> None:
        self.clock, self.busy_at = clock, list(busy_at)
        self.busy = False
        self.polled_at: list[float] = []

    def poll(self) -> list[TransportEvent]:
        self.clock.now += ROUND_S
        self.polled_at.append(self.clock.now)
        self.busy = bool(self.busy_at) and self.clock.now >= self.busy_at[0]
        if self.busy:
            self.busy_at.pop(0)
        return []


class Wake:
    """Replaces the agent's event `_wake`: a wait moves the clock. `commands_at`: when the event is set."""

    def __init__(self, clock: Clock, commands_at: tuple[float, ...] = ()) -> None:
        self.clock, self.commands_at = clock, list(commands_at)
        self.pauses: list[tuple[float, float]] = []  # (when, for how long at most)
        self.is_set = False

    def wait(self, timeout: float) -> bool:
        self.pauses.append((self.clock.now, timeout))
        is_set = bool(self.commands_at) and self.commands_at[0] <= self.clock.now + timeout
        self.clock.now = max(self.clock.now, self.commands_at.pop(0)) if is_set else self.clock.now + timeout
        self.is_set |= is_set
        return is_set

    def clear(self) -> None:
        self.is_set = False

    def set(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=clock))
    return clock


def run_agent(clock: Clock, wire: Wire, wake: Wake, seconds: float, *, active: bool = False) -> None:
    """Run the loop of the agent's thread for `seconds` of the clock."""
    buffer = bytearray(4 * LAYOUT.block_bytes)
    pool = PoolMemory(0, 4, LAYOUT, memoryview(buffer))
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), pool, lambda _: cast(Any, wire), lambda _: None)
    agent._wake = cast(Any, wake)
    agent.perform([], active)
    end, poll = clock.now + seconds, wire.poll

    def poll_until_the_end() -> list[TransportEvent]:
        agent._closing = clock.now >= end
        return poll()

    wire.poll = poll_until_the_end  # type: ignore[method-assign]
    agent._run_until_closed(cast(Any, wire))
    assert not wake.is_set, "a command that was taken wakes the thread again and again"


@pytest.mark.parametrize("active", [True, False])
def test_pauses_begin_late_and_grow_with_the_quiet_as_far_as_the_config_says(clock: Clock, active: bool) -> None:
    begun, wire, wake = clock.now, Wire(clock), Wake(clock)
    run_agent(clock, wire, wake, seconds=1.0, active=active)
    longest = CONFIG.active_poll_interval_s if active else CONFIG.idle_poll_interval_s
    first = wake.pauses[0][0]
    assert first >= begun + SPIN_S
    assert sum(when <= first for when in wire.polled_at) >= SPIN_S / ROUND_S - 1
    lengths = [length for _, length in wake.pauses]
    assert lengths[0] == FIRST_PAUSE_S
    assert lengths == sorted(lengths)
    assert lengths[-1] == longest
    for when, length in wake.pauses:
        assert length == pytest.approx(min(max(PAUSE_SHARE * (when - begun), FIRST_PAUSE_S), longest))


@pytest.mark.parametrize("is_command", [True, False])
def test_a_command_and_whatever_moves_end_the_pauses_for_a_while(clock: Clock, is_command: bool) -> None:
    at = clock.now + 0.5
    wire, wake = Wire(clock, () if is_command else (at,)), Wake(clock, (at,) if is_command else ())
    run_agent(clock, wire, wake, seconds=0.6)
    polled_at = next(when for when in wire.polled_at if when >= at)
    assert polled_at - at <= ROUND_S * 1.01 + (0 if is_command else CONFIG.idle_poll_interval_s)
    when, length = next(pause for pause in wake.pauses if pause[0] > polled_at)
    assert when - polled_at >= SPIN_S - ROUND_S * is_command
    assert length == FIRST_PAUSE_S


# ---- was a poll that UCX says nothing of an empty one?


def polls(*times: tuple[float, float]) -> list[bool]:
    """(pause before it, how long it took) of each poll -> whether it moved something."""
    clock = Clock()
    poll_time, found = PollTime(clock), []
    for pause_s, took_s in times:
        clock.now += pause_s
        poll_time.begin()
        clock.now += took_s
        found.append(poll_time.end())
    return found


def test_a_poll_that_took_longer_than_an_empty_one_has_moved_something() -> None:
    empty, copying = 0.9 * EMPTY_POLL_S, 1.1 * EMPTY_POLL_S
    assert polls((0.0, empty), (0.0, empty), (0.0, copying), (0.0, empty)) == [False, False, True, False]


def test_the_first_poll_after_a_while_is_long_of_itself() -> None:
    copying = 10 * EMPTY_POLL_S
    assert polls((0.0, copying), (0.9 * WARM_S, copying)) == [False, True], "nothing came before the first"
    assert polls((0.0, 0.0), (1.1 * WARM_S, copying), (0.0, copying)) == [False, False, True]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_read_that_has_ended_while_the_thread_was_stopped_is_not_late(clock: Clock, has_ended: bool) -> None:
    """The thread looked at its clock before it asked the transport, and cancelled the read: a prompt computed twice."""
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    events: list[Any] = []
    ended = iter([[], [ReadDone(1)] if has_ended else []])
    wire = Mock(busy=False, start_block_read=lambda *_: 1, try_complete=lambda _: False, poll=lambda: next(ended))
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), pool, lambda _: wire, events.extend)
    agent.perform([Connect(OWNER), StartRead(1, 7, "owner", (1,), (1,), 2.0)], active=True)
    agent._run_once(wire)
    clock.now += 10.0
    agent._run_once(wire)
    assert [type(event) for event in events] == [ReadFinished if has_ended else ReadTimedOut]
    assert wire.cancel.called is not has_ended


def test_a_probe_that_ends_while_a_poll_is_stopped_is_not_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prober took a later time than the reads, and cancelled the probe: the router avoided a slow path."""
    monkeypatch.setattr(path_probe, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    events: list[Any] = []
    wire = Mock(busy=False, start_read=lambda *_: 1)
    agent = TransferAgent(CONFIG, AgentIdentity("w", 1), pool, lambda _: wire, events.extend)

    def stopped_poll() -> list[TransportEvent]:
        clock.now += 10.0
        return []

    wire.poll = stopped_poll
    agent.perform([Connect(OWNER), ProbePath("owner", 64, 2.0)], active=True)
    agent._run_once(wire)
    wire.poll = lambda: [ReadDone(1)]
    agent._run_once(wire)
    assert [type(event) for event in events] == [PathProbed]
    assert not wire.cancel.called
