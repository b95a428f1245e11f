"""The paths to the peers that this agent reads from: connected, measured before the first hand-off, judged, watched.

    a peer joins, or hands off first --PING--> CONNECTING --answers, probes--> FINE | SLOW | FALLBACK
                                                   |  ^
                                 no answer in time v  | after RETRY_S
                                               UNREACHABLE
    KV layouts that cannot be translated, memory that no path reaches: REFUSED

The reading side measures: PINGs for the round trip, then probes, reads of bytes that hold no KV. Probing starts only
while no transfer with the peer is alive. Each later hand-off that moves enough bytes measures its own path. The best of
the last few speeds counts, so one busy moment does not make a path slow. A path that is not fine is measured again
after RETRY_S.

No hand-off waits for any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto

from core.config import TransferConfig
from core.errors import LayoutMismatch
from core.handoff import AgentAddress, Ping
from core.paths import Lane, PathState, PathStatus
from kv_transfer.protocol.events import Actions, Disconnect, LogPath, PathProbed, ProbeFailed, ProbePath
from kv_transfer.protocol.path_verdict import expected_bytes_per_s, judge, lane_of
from kv_transfer.protocol.peers import Drop, Peers
from kv_transfer.protocol.plan import plan_from

MAX_PATHS = 64  # watched paths; above, the least recently used good one is forgotten
MAX_REMEMBERED = 1024  # fine paths above MAX_PATHS: a hand-off on one of them does not measure it again
PING_INTERVAL_S = 0.2  # until the answer
NUM_PINGS = 4  # the first PING ends a pause of the peer's agent; the shortest round trip counts
FIRST_PROBE_BYTES = 65_536
PROBE_GROWTH = 4
MIN_PROBE_S = 0.005  # shorter probes are followed by larger ones
NUM_SPEEDS = 3  # probes of the last size, and the number of speeds that are kept
MIN_HAND_OFF_BYTES = 8_388_608  # of a hand-off that measures its path: latency dominates smaller ones
MIN_HAND_OFF_S = 1e-4  # and at the expected speed, its reads take at least this long
RETRY_S = 10.0
BUSY_RETRY_S = 0.5
REPORTED_CHANGE = 0.25  # a speed that differs by less from the reported one is not reported


class _Phase(Enum):
    DONE = auto()
    PINGING = auto()  # until the answer
    PROBING = auto()  # until the probe ends
    PAUSED = auto()  # until it is time to measure again


@dataclass(slots=True)
class _Path:
    peer: AgentAddress
    expected_bytes_per_s: float
    max_probe_bytes: int
    state: PathState = PathState.CONNECTING
    detail: str = ""
    step: _Phase = _Phase.DONE
    due: float | None = None  # when the step is over
    give_up_at: float = 0.0  # on PINGs
    ping: int = 0  # counter of the newest PING
    pinged_at: float = 0.0
    num_answers: int = 0
    latency_s: float = 0.0
    probe_bytes: int = 0
    num_probes: int = 0  # of the last size, ended
    seen: Lane = Lane.UNKNOWN  # by all probes of the last size
    lane: Lane = Lane.UNKNOWN
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SPEEDS))
    reported: PathStatus | None = None

    def status(self) -> PathStatus:
        fastest = max(self.speeds, default=0.0)
        return PathStatus(
            self.peer.name, self.state, self.lane, fastest, self.expected_bytes_per_s, self.latency_s, self.detail
        )

    def report(self) -> PathStatus:
        """The status, as it was when the path last changed."""
        now, before = self.status(), self.reported
        if (
            before is None
            or (now.state, now.lane, now.detail) != (before.state, before.lane, before.detail)
            or abs(now.bytes_per_s - before.bytes_per_s) > REPORTED_CHANGE * before.bytes_per_s
        ):
            self.reported = before = now
        return before

    def next_step(self, step: _Phase, due: float | None) -> None:
        self.step, self.due = step, due


class Paths:
    def __init__(self, config: TransferConfig, peers: Peers) -> None:
        self._config = config
        self._peers = peers
        self._paths: dict[str, _Path] = {}  # by the peer's name; least recently used first
        self._remembered: dict[str, _Path] = {}  # fine paths that had to leave `_paths`, oldest first
        # Caches: every event and every report reads these values, and most events change no path.
        self._statuses: tuple[PathStatus, ...] | None = None  # None: out of date
        self._first_due: list[float] | None = None  # the same; of all paths, none or one

    def _note_change(self) -> None:
        """Call before a change of any path."""
        self._statuses = self._first_due = None

    def watch(self, peer: AgentAddress, in_use: Container[str], now: float) -> Actions:
        """Connect to a peer that this agent will read from, and measure the path."""
        self._note_change()
        path = self._paths.get(peer.name)
        if path is not None:
            return self._connect(path, in_use, now) if path.state is PathState.UNREACHABLE else []
        path = self._add(peer)
        if path is None or path.state is PathState.FINE:
            return []
        try:
            plan_from(peer.layout, self._peers.address.layout)
        except LayoutMismatch as mismatch:
            return self._conclude(path, PathState.REFUSED, now, str(mismatch))
        return self._connect(path, in_use, now)

    def lane_to(self, name: str) -> str:
        """Name of the lane to a peer; empty if the path is not watched."""
        path = self._paths.get(name)
        return "" if path is None else path.lane.value

    def _add(self, peer: AgentAddress) -> _Path | None:
        """Above MAX_PATHS, a fine path is only remembered; None where no path is fine. A remembered path stays fine."""
        if len(self._paths) >= MAX_PATHS:
            fine = next((name for name, path in self._paths.items() if path.state is PathState.FINE), None)
            if fine is None:
                return None
            self._remembered[fine] = self._paths.pop(fine)
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        known = self._remembered.pop(peer.name, None)
        if known is not None and known.peer == peer:
            self._paths[peer.name] = known
            return known
        ours = self._peers.address
        expected = expected_bytes_per_s(ours.location, peer.location, self._config.expected_path_bytes_per_s)
        path = _Path(peer, expected, min(ours.probe_bytes, peer.probe_bytes))
        self._paths[peer.name] = path
        return path

    def forget(self, name: str, in_use: Container[str]) -> Actions:
        """The peer has left the fleet."""
        self._note_change()
        self._paths.pop(name, None)
        self._remembered.pop(name, None)
        if self._peers.address_of(name) is None or name in in_use:
            return []
        self._peers.forget(name)
        return [Disconnect(name)]

    def forget_other(self, peer: AgentAddress) -> None:
        """Of another incarnation of this peer."""
        for paths in (self._paths, self._remembered):
            if peer.name in paths and paths[peer.name].peer.incarnation != peer.incarnation:
                self._note_change()
                del paths[peer.name]

    def on_hand_off(self, owner: AgentAddress, num_bytes: int, seconds: float, now: float) -> Actions:
        """A pull from `owner` has completed; its reads took so many seconds."""
        self._note_change()
        path = self._paths.pop(owner.name, None)
        if path is None:
            path = self._add(owner)
            if path is None:
                return []
        self._paths[owner.name] = path  # the most recently used
        if num_bytes >= max(MIN_HAND_OFF_BYTES, MIN_HAND_OFF_S * path.expected_bytes_per_s):
            path.speeds.append(num_bytes / max(seconds, 1e-9))
        if path.step in (_Phase.PINGING, _Phase.PROBING):
            return []
        if path.max_probe_bytes and path.state in (PathState.CONNECTING, PathState.UNREACHABLE):
            path.next_step(_Phase.PAUSED, now)  # the lane is unknown: measure the path once no transfer needs the peer
            return []
        state = self._judged(path)
        return [] if state is path.state else self._conclude(path, state, now)

    # ---- PINGs

    def on_ping(self, sender: str, ping: Ping, in_use: Container[str], now: float) -> Actions:
        peer = self._peers.address_of(sender)
        if peer is None:
            if ping.ack is not None:
                self._peers.drop(Drop.UNKNOWN_PEER)
            return []  # the router may introduce the peer later, and the peer repeats its PING
        if ping.incarnation != peer.incarnation:
            self._peers.drop(Drop.FOREIGN)
            return []
        if ping.ack is None:
            return self._peers.send(peer, Ping(*self._peers.stamp(), ping.counter))
        path = self._paths.get(sender)
        if path is None or path.step is not _Phase.PINGING or ping.ack != path.ping:
            return []
        self._note_change()
        round_trip_s = now - path.pinged_at
        path.latency_s = round_trip_s if path.num_answers == 0 else min(path.latency_s, round_trip_s)
        path.num_answers += 1
        if path.num_answers < NUM_PINGS:
            return self._ping(path, now)
        if not path.max_probe_bytes:
            return self._conclude(path, self._judged(path), now)
        if sender in in_use:
            path.next_step(_Phase.PAUSED, now + BUSY_RETRY_S)
            return []
        path.probe_bytes, path.num_probes = min(FIRST_PROBE_BYTES, path.max_probe_bytes), 0
        return self._probe(path, now)

    def _connect(self, path: _Path, in_use: Container[str], now: float) -> Actions:
        path.num_answers = 0
        path.give_up_at = now + self._config.connect_timeout_s
        return self._peers.connect(path.peer, in_use) + self._ping(path, now)

    def _ping(self, path: _Path, now: float) -> Actions:
        incarnation, path.ping = self._peers.stamp()
        path.pinged_at = now
        path.next_step(_Phase.PINGING, min(now + PING_INTERVAL_S, path.give_up_at))
        return self._peers.send(path.peer, Ping(incarnation, path.ping, None))

    # ---- probes

    def on_probed(self, event: PathProbed, now: float) -> Actions:
        self._note_change()
        path = self._paths.get(event.peer)
        if path is None or path.step is not _Phase.PROBING:
            return []
        if event.seconds < MIN_PROBE_S and path.probe_bytes < path.max_probe_bytes:
            path.probe_bytes = min(PROBE_GROWTH * path.probe_bytes, path.max_probe_bytes)
            return self._probe(path, now)
        path.seen = event.seen if path.num_probes == 0 or event.seen is path.seen else Lane.UNKNOWN
        path.speeds.append(event.num_bytes / max(event.seconds, 1e-9))
        path.num_probes += 1
        if path.num_probes < NUM_SPEEDS:
            return self._probe(path, now)
        path.lane = lane_of(path.seen, max(path.speeds), self._peers.address.location, path.peer.location)
        return self._conclude(path, self._judged(path), now)

    def on_probe_failed(self, event: ProbeFailed, now: float) -> Actions:
        self._note_change()
        path = self._paths.get(event.peer)
        if path is None or path.step is not _Phase.PROBING:
            return []
        return self._conclude(path, PathState.SLOW, now, f"a probe failed: {event.detail}")

    def _probe(self, path: _Path, now: float) -> Actions:
        timeout_s = path.probe_bytes / self._config.min_bytes_per_s + self._config.read_grace_s
        path.next_step(_Phase.PROBING, now + 2 * timeout_s)  # the agent ends the probe earlier
        return [ProbePath(path.peer.name, path.probe_bytes, timeout_s)]

    # ---- verdicts

    def on_peer_lost(self, name: str, detail: str, now: float) -> Actions:
        self._note_change()
        self._remembered.pop(name, None)
        path = self._paths.get(name)
        if path is None or path.state is PathState.REFUSED:
            return []
        return self._conclude(path, PathState.UNREACHABLE, now, detail or "the connection broke")

    def _judged(self, path: _Path) -> PathState:
        return judge(path.status(), self._peers.address.location, path.peer.location, self._config.slow_path_share)

    def _conclude(self, path: _Path, state: PathState, now: float, detail: str = "") -> Actions:
        if state in (PathState.FINE, PathState.REFUSED):
            path.next_step(_Phase.DONE, None)
        else:
            path.next_step(_Phase.PAUSED, now + RETRY_S)
        changed = state is not path.state
        path.state, path.detail = state, detail
        return [LogPath(path.status())] if changed else []

    # ---- time

    def on_tick(self, now: float, in_use: Container[str]) -> tuple[Actions, list[str]]:
        """Actions, and the names of peers that answer no PING."""
        actions: Actions = []
        silent = []
        for name, path in list(self._paths.items()):
            if path.due is None or now < path.due:
                continue
            self._note_change()
            if path.step is _Phase.PINGING and now < path.give_up_at:
                actions += self._ping(path, now)
            elif path.step is _Phase.PROBING:
                actions += self._conclude(path, PathState.SLOW, now, "a probe did not end")
            elif name in in_use:
                path.next_step(_Phase.PAUSED, now + BUSY_RETRY_S)  # heartbeats of the transfers watch the peer
            elif path.step is _Phase.PINGING:
                silent.append(name)
            else:
                actions += self._connect(path, in_use, now)
        return actions, silent

    def deadlines(self) -> list[float]:
        """The first one, if there is one."""
        if self._first_due is None:
            dues = [path.due for path in self._paths.values() if path.due is not None]
            self._first_due = [min(dues)] if dues else []
        return self._first_due

    # ---- view

    def statuses(self) -> tuple[PathStatus, ...]:
        """Every path, as it was when it last changed."""
        if self._statuses is None:
            self._statuses = tuple(path.report() for path in self._paths.values())
        return self._statuses

    def check(self) -> None:
        assert len(self._paths) <= MAX_PATHS
        assert len(self._remembered) <= MAX_REMEMBERED
        assert self._paths.keys().isdisjoint(self._remembered)
        assert all(path.state is PathState.FINE for path in self._remembered.values())
        known = self.deadlines()
        self._first_due = None
        assert known == self.deadlines()
        if self._statuses is not None:
            assert self._statuses == tuple(path.report() for path in self._paths.values())
        for name, path in self._paths.items():
            assert name == path.peer.name
            assert self._peers.address_of(name) is None or self._peers.knows(name, path.peer.incarnation)
            assert (path.step is _Phase.DONE) == (path.due is None)
