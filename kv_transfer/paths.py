"""The paths to peers that a router has introduced: connected ahead of the first hand-off, measured, judged, watched.

    introduced --PING--> CONNECTING --PINGs answered, probes read--> FINE | SLOW | FALLBACK   (may change at any time)
        |                    |   ^
        |                    v   +------ a pause that doubles
        |                UNREACHABLE <--- no answer within connect_timeout_s, or the connection broke
        +--> REFUSED     layouts that cannot be translated

Who will read measures; the other end only sees whether there is an answer, and asks again whenever somebody is
introduced. A probe reads bytes that the peer keeps for nothing else, a few at first and more while that takes no time,
and none while a pull is under way. The shortest round trip and the best of the last few speeds count: a busy moment is
not a slow path. What is not fine is looked at again.

Nothing here is needed for a hand-off. A peer that is not introduced, or for which there is no room, is connected to by
its first hand-off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto

from core.config import TransferConfig
from core.errors import LayoutMismatch
from core.handoff import AgentAddress, HandoffMessage, Ping
from core.paths import (
    BROKEN,
    Lane,
    PathState,
    PathStatus,
    PeerIntroduced,
    expected_bytes_per_s,
    judge,
    lane_of,
)
from kv_transfer.events import Disconnect, PathProbed, PathSeen, ProbeFailed, ProbePath, TellPath
from kv_transfer.peers import MAX_IDLE_PEERS, Drop, Peers
from kv_transfer.plan import TransferPlan

MAX_PATHS = MAX_IDLE_PEERS
PINGS_PER_TIMEOUT = 5  # a PING may be lost
NUM_PINGS = 4  # the first one wakes the peer up
FIRST_PROBE_BYTES = 65_536
PROBE_GROWTH = 4
ENOUGH_S = 0.005  # a probe that took so long says enough of the speed
NUM_PROBES = 3  # of the last size
PAUSE_S, MAX_PAUSE_S = 5.0, 60.0  # until a path that is not fine is looked at again
BUSY_PAUSE_S = 0.5  # ... and until a probe is tried again that gave way to a pull


class _Wait(Enum):
    NOTHING = auto()
    ANSWER = auto()  # to a PING
    PROBE = auto()  # for its end
    TURN = auto()  # until it is time to connect or to probe


@dataclass(slots=True)
class _Path:
    peer: AgentAddress
    is_owner: bool  # we read from it
    expected: float
    most_bytes: int  # of one probe
    state: PathState = PathState.CONNECTING
    detail: str = ""
    wait: _Wait = _Wait.NOTHING
    due: float | None = None
    pause_s: float = PAUSE_S
    ping: int = 0  # counter of the newest
    pinged_at: float = 0.0
    num_answers: int = 0
    heard: bool = False  # a PING of its own, since we connected
    give_up_at: float = 0.0
    probe_bytes: int = 0  # of the probe in flight
    num_probes: int = 0  # of the last size, done
    latency_s: float = 0.0
    lane: Lane = Lane.UNKNOWN
    seen: Lane = Lane.UNKNOWN  # by all probes of the last size
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PROBES))

    def status(self) -> PathStatus:
        fastest = max(self.speeds, default=0.0)
        return PathStatus(
            self.peer.name, self.state, self.lane, fastest, self.expected, self.latency_s, self.detail
        )  # fmt: skip

    def wait_for(self, wait: _Wait, due: float | None) -> None:
        self.wait, self.due = wait, due


class Paths:
    def __init__(self, config: TransferConfig, peers: Peers) -> None:
        self._config = config
        self._peers = peers
        self._paths: dict[str, _Path] = {}  # by the peer's name

    # ---- told by a router

    def introduce(self, event: PeerIntroduced, now: float) -> None:
        self._ask_silent_readers(now)
        peer, ours = event.peer, self._peers.address
        known = self._paths.get(peer.name)
        if known is not None and known.peer.incarnation == peer.incarnation:
            if known.state is PathState.UNREACHABLE:
                known.wait_for(_Wait.TURN, now)
            return
        if known is None and len(self._paths) >= MAX_PATHS:
            return
        expected = expected_bytes_per_s(ours.location, peer.location, self._config.expected_path_bytes_per_s)
        most_bytes = min(ours.probe_bytes, peer.probe_bytes)
        self._paths[peer.name] = path = _Path(peer, event.is_owner, expected, most_bytes)
        differences = _differences(ours, peer, event.is_owner)
        if differences is not None:
            self._change(path, PathState.REFUSED, str(differences))
        else:
            self._connect(path, now)

    def dismiss(self, name: str, in_use: Container[str]) -> None:
        if self._paths.pop(name, None) is not None and self._peers.address_of(name) is not None and name not in in_use:
            self._peers.act(Disconnect(name))
            self._peers.forget(name)

    # ---- told by the peer

    def on_message(self, sender: str, message: HandoffMessage, now: float) -> None:
        """Any message is a sign of life."""
        path = self._paths.get(sender)
        if path is not None and path.wait is _Wait.ANSWER and message.incarnation == path.peer.incarnation:
            path.give_up_at = now + self._config.connect_timeout_s

    def on_ping(self, sender: str, ping: Ping, now: float) -> None:
        peer = self._peers.address_of(sender)
        if peer is None:
            if ping.ack is not None:
                self._peers.drop(Drop.UNKNOWN_PEER)
            return  # not introduced to us yet, perhaps; it pings again
        if ping.incarnation != peer.incarnation:
            self._peers.drop(Drop.FOREIGN)
        elif ping.ack is None:
            self._peers.send(peer, Ping(*self._peers.stamp(), ping.counter))
            path = self._paths.get(sender)
            if path is not None and path.wait is _Wait.ANSWER and path.num_answers == 0 and not path.heard:
                path.heard = True
                self._ping(path, now)  # ours may have come before it was introduced to us
        else:
            self._on_answer(sender, ping.ack, now)

    def _on_answer(self, sender: str, ack: int, now: float) -> None:
        path = self._paths.get(sender)
        if path is None or path.wait is not _Wait.ANSWER or ack != path.ping:
            return
        round_trip = now - path.pinged_at
        path.latency_s = round_trip if path.num_answers == 0 else min(path.latency_s, round_trip)
        path.num_answers += 1
        if path.is_owner and path.num_answers < NUM_PINGS:
            self._ping(path, now)
        elif path.is_owner and path.most_bytes:
            path.wait_for(_Wait.TURN, now)
        else:
            self._conclude(path, now)

    # ---- told by the agent

    def on_probed(self, event: PathProbed, now: float) -> None:
        path = self._paths.get(event.peer)
        if path is None or path.wait is not _Wait.PROBE:
            return
        if event.seconds < ENOUGH_S and path.probe_bytes < path.most_bytes:
            path.probe_bytes = min(PROBE_GROWTH * path.probe_bytes, path.most_bytes)
            self._probe(path, now)
            return
        path.seen = event.seen if path.num_probes == 0 or event.seen is path.seen else Lane.UNKNOWN
        path.speeds.append(event.num_bytes / max(event.seconds, 1e-9))
        path.num_probes += 1
        if path.num_probes < NUM_PROBES:
            self._probe(path, now)
        else:
            path.lane = lane_of(path.seen, self._peers.address.location, path.peer.location)
            self._conclude(path, now)

    def on_probe_failed(self, event: ProbeFailed, now: float) -> None:
        path = self._paths.get(event.peer)
        if path is not None and path.wait is _Wait.PROBE:
            self._give_way(path, PathState.SLOW, f"a probe failed: {event.detail}", now)

    def on_seen(self, event: PathSeen, now: float) -> None:
        path = self._paths.get(event.peer)
        if path is not None and path.state in (PathState.FINE, PathState.SLOW) and path.wait is not _Wait.PROBE:
            path.speeds.append(event.bytes_per_s)
            if self._judged(path) is not path.state:
                self._conclude(path, now)

    def on_peer_lost(self, name: str, detail: str, now: float) -> None:
        path = self._paths.get(name)
        if path is not None and path.state is not PathState.REFUSED:
            self._give_way(path, PathState.UNREACHABLE, detail or "the connection broke", now)

    # ---- time

    def on_tick(self, now: float, in_use: Container[str]) -> list[str]:
        """Returns the peers that are unreachable, of those that no live transfer needs."""
        silent = []
        for path in list(self._paths.values()):
            if path.due is None or now < path.due:
                continue
            if path.wait is _Wait.ANSWER and now < path.give_up_at:
                self._ping(path, now)
            elif path.wait is _Wait.ANSWER and path.peer.name in in_use:
                self._connect(path, now)  # its transfers have heartbeats of their own
            elif path.wait is _Wait.ANSWER:
                silent.append(path.peer.name)
            elif path.wait is _Wait.PROBE:
                self._give_way(path, PathState.SLOW, "a probe did not end", now)
            elif path.num_answers == 0:
                self._connect(path, now)
            elif path.peer.name in in_use:
                path.num_answers = 0
                path.wait_for(_Wait.TURN, now + BUSY_PAUSE_S)
            else:
                path.probe_bytes, path.num_probes = min(FIRST_PROBE_BYTES, path.most_bytes), 0
                self._probe(path, now)
        return silent

    def deadlines(self) -> list[float]:
        return [path.due for path in self._paths.values() if path.due is not None]

    # ---- asking

    def statuses(self) -> tuple[PathStatus, ...]:
        """Of every path we read over, and of the others where something is wrong; one name each."""
        return tuple(path.status() for path in self._paths.values() if path.is_owner or path.state in BROKEN)

    def settled(self) -> list[str]:
        return [name for name, path in self._paths.items() if path.state is not PathState.CONNECTING]

    # ---- inside

    def _ask_silent_readers(self, now: float) -> None:
        """Who reads from us may have died while no router lived to say so: a path on which we only wait would keep its
        place for ever, and no router hears of it while it is fine."""
        for path in self._paths.values():
            if not path.is_owner and path.state is PathState.FINE and path.wait is _Wait.NOTHING:
                self._connect(path, now)

    def _connect(self, path: _Path, now: float) -> None:
        path.num_answers, path.heard = 0, False
        if not self._peers.meet_ahead(path.peer):
            path.wait_for(_Wait.TURN, now + MAX_PAUSE_S)
            return
        path.give_up_at = now + self._config.connect_timeout_s
        self._ping(path, now)

    def _ping(self, path: _Path, now: float) -> None:
        incarnation, path.ping = self._peers.stamp()
        path.pinged_at = now
        path.wait_for(_Wait.ANSWER, min(now + self._config.connect_timeout_s / PINGS_PER_TIMEOUT, path.give_up_at))
        self._peers.send(path.peer, Ping(incarnation, path.ping, None))

    def _probe(self, path: _Path, now: float) -> None:
        timeout_s = path.probe_bytes / self._config.min_bytes_per_s + self._config.read_grace_s
        path.wait_for(_Wait.PROBE, now + 2 * timeout_s)  # the agent ends it before
        self._peers.act(ProbePath(path.peer.name, path.probe_bytes, timeout_s))

    def _judged(self, path: _Path) -> PathState:
        return judge(path.status(), self._peers.address.location, path.peer.location, self._config.slow_path_share)

    def _conclude(self, path: _Path, now: float) -> None:
        state = self._judged(path)
        if state in BROKEN:
            self._give_way(path, state, "", now)
        else:
            path.wait_for(_Wait.NOTHING, None)
            self._change(path, state, "")

    def _give_way(self, path: _Path, state: PathState, detail: str, now: float) -> None:
        """Something is wrong: look again later. The pause never shrinks, so a path on the edge is not told all day."""
        path.wait_for(_Wait.TURN, now + path.pause_s)
        path.pause_s = min(2 * path.pause_s, MAX_PAUSE_S)
        path.num_answers = 0  # PINGs first: over TCP a read needs the owner, which looks rarely while nothing moves
        self._change(path, state, detail)

    def _change(self, path: _Path, state: PathState, detail: str) -> None:
        changed = state is not path.state
        path.state, path.detail = state, detail
        if changed:
            self._peers.act(TellPath(path.status()))

    def check(self) -> None:
        assert len(self._paths) <= MAX_PATHS
        for name, path in self._paths.items():
            assert name == path.peer.name
            assert (path.wait is _Wait.NOTHING) == (path.due is None)


def _differences(ours: AgentAddress, peer: AgentAddress, is_owner: bool) -> LayoutMismatch | None:
    """What keeps the blocks of one from being translated to the other's."""
    try:
        if is_owner:
            TransferPlan(peer.layout, ours.layout)
        else:
            TransferPlan(ours.layout, peer.layout)
    except LayoutMismatch as mismatch:
        if not is_owner:
            return mismatch
        return LayoutMismatch({name: (here, there) for name, (there, here) in mismatch.differences.items()})
    return None
