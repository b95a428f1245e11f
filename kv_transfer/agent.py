"""TransferAgent: the shell of a TransferMachine. One thread owns the transport; no other thread touches it.

    any thread --perform(actions)--> [ agent thread: transport ] --on_events(events)--> the caller

The thread performs actions, polls the transport, cancels late reads and reports events. While bytes or messages move,
the thread polls without a pause. Otherwise it sleeps until a command arrives or a pause ends. The pause grows with the
time since the last event, up to a limit that is shorter while transfers are alive. A second thread computes the digests
of offered blocks. Both threads run at a lower priority than the worker's event loop. The agent decides nothing: the
machine decides which block goes where, and what is repeated or given up.

`on_events` is called on the agent's thread and must not block; an event loop passes a function that does
`loop.call_soon_threadsafe`. An exception on the thread ends the agent with one `AgentFailed`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from core.config import TransferConfig
from core.errors import PeerDisconnected, TransportError
from core.handoff import MAX_NAME_CHARS, AbortReason, AgentAddress, HandoffMessage, Ready
from kv_transfer.location import locate
from kv_transfer.offered_digests import OfferedDigests
from kv_transfer.path_probe import PathProber, log_path
from kv_transfer.protocol.digests import Digests
from kv_transfer.protocol.events import (
    AgentAction,
    AgentEvent,
    AgentFailed,
    ComputeDigests,
    Connect,
    Disconnect,
    LogPath,
    MessageReceived,
    PeerLost,
    ProbeFailed,
    ProbePath,
    ReadFailed,
    ReadTimedOut,
    SendMessage,
    StartRead,
)
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.reads import Read, Reads
from kv_transfer.transports.transport import Notification, PoolMemory, ReadBroken, ReadDone, Transport
from protos.handoff_codec import MalformedMessage, OtherVersion, decode, encode, encode_version

# After an event the thread polls without a pause for SPIN_S. The shortest sleep takes half of it, and over TCP, where
# this thread copies for a reader, each sleep delays the reader.
SPIN_S = 0.0002
FIRST_PAUSE_S = 0.00005
PAUSE_SHARE = 1 / 16  # of the time since the last event; bounds how late the thread sees the next one
NICENESS = 5  # an event loop that wakes during a copy runs at once, not after a time slice of 3 to 4 ms
MAX_COMMANDS = 65_536  # commands, more than all transfers need at once; beyond: the agent hangs, and its worker ends

logger = logging.getLogger(__name__)

OnEvents = Callable[[list[AgentEvent]], None]


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Identifies a transfer agent. A restarted worker has another incarnation, so old messages do not match."""

    worker_id: str
    incarnation: int  # random 64 bits, not 0

    @property
    def name(self) -> str:
        return f"{self.worker_id}.{self.incarnation:016x}"


@dataclass(slots=True)
class _ConnectedPeer:
    address: AgentAddress
    plan: TransferPlan | None = None  # of reads from the peer
    read_ended_at: float = 0.0  # of the newest read


class TransferAgent:
    def __init__(
        self,
        config: TransferConfig,
        identity: AgentIdentity,
        pool: PoolMemory,
        open_transport: Callable[[str], Transport],
        on_events: OnEvents,
    ) -> None:
        """`open_transport` makes a transport of the given name; the agent's thread calls it once, after `start`."""
        self.config = config
        self.identity = identity
        self.pool = pool
        self.num_malformed = 0  # notifications that could not be decoded; written by the agent's thread alone
        self._open_transport = open_transport
        self._on_events = on_events
        self._address: AgentAddress | None = None
        self._commands: deque[AgentAction] = deque()
        self._reads_to_start: deque[StartRead] = deque()
        self._events: list[AgentEvent] = []
        self._peers: dict[str, _ConnectedPeer] = {}
        self._reads = Reads(pool, config.verify_digests)
        self._prober = PathProber(pool)
        self._active = False
        self._closing = False
        self._failure = ""
        self._wake = threading.Event()
        self._offered_digests = OfferedDigests(identity.name, pool, config.verify_digests, self._wake.set)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{identity.name}", daemon=True)

    # ---- for any thread

    def start(self, timeout_s: float = 30.0) -> AgentAddress:
        """Open the transport, register the pool and return our address. Blocks: call it from a thread.

        Raises `TransportError` on a failure and after `timeout_s`.
        """
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise TransportError(f"the transport did not start within {timeout_s} s")
        return self.address

    @property
    def address(self) -> AgentAddress:
        """The agent's own address. Raises `TransportError` before `start` and after a failure."""
        if self._address is None:
            raise TransportError(self._failure or "the transfer agent was not started")
        return self._address

    def perform(self, actions: Sequence[AgentAction], active: bool) -> None:
        """Queue actions of the machine. `active`: whether it has live transfers (`TransferMachine.alive`).

        An agent that was closed or has failed drops them. Raises `TransportError` if too many wait: its thread may hang
        inside the transport.
        """
        if self._closing or self._failure:
            return
        num_waiting = len(self._commands) + len(self._reads_to_start) + len(actions)
        if num_waiting > MAX_COMMANDS:
            raise TransportError(f"{num_waiting} actions wait for the transfer agent, more than {MAX_COMMANDS}")
        if actions or active != self._active:  # most calls change nothing: a worker calls after each of its steps
            self._commands.extend(actions)
            self._active = active
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Perform the queued actions, end all reads and stop. Raises `TransportError` after `timeout_s`."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"the transfer agent did not end within {timeout_s} s")

    # ---- the agent's thread

    def _run(self) -> None:
        transport: Transport | None = None
        try:
            if sys.platform == "linux":  # where niceness belongs to a thread and to the threads that it starts
                os.nice(NICENESS)
            transport = self._open_transport(self.identity.name)
            transport.register(self.pool)
            self._address = AgentAddress(
                name=self.identity.name,
                incarnation=self.identity.incarnation,
                metadata=transport.metadata(),
                pool_base=self.pool.address,
                num_blocks=self.pool.num_blocks,
                layout=self.pool.layout,
                lease_s=self.config.lease_s,
                probe_bytes=self.pool.probe_bytes,
                location=locate(self.pool),
                device=self.pool.device,
            )
            self._started.set()
            self._run_until_closed(transport)
        except Exception as error:
            # The thread's boundary. The worker must learn of any failure, since peers can no longer read its pool.
            logger.exception("transfer agent %s failed", self.identity.name)
            self._failure, self._address = f"{type(error).__name__}: {error}", None
            self._on_events([AgentFailed(self._failure)])
        finally:
            self._started.set()
            self._close(transport)

    def _run_until_closed(self, transport: Transport) -> None:
        quiet_since = time.monotonic()
        while not self._closing:
            if self._run_once(transport):
                quiet_since = time.monotonic()
            if time.monotonic() - quiet_since < SPIN_S:
                os.sched_yield()  # for other Python threads; a sleep of 0 takes as long as two blocks
                continue
            active = self._active or self._reads or self._prober.probes
            longest_s = self.config.active_poll_interval_s if active else self.config.idle_poll_interval_s
            pause_s = PAUSE_SHARE * (time.monotonic() - quiet_since)
            if self._wake.wait(min(max(pause_s, FIRST_PAUSE_S), longest_s)):
                self._wake.clear()
                quiet_since = time.monotonic()
        while self._commands or self._reads_to_start or self._offered_digests.busy:
            if not self._run_once(transport):
                self._wake.wait(FIRST_PAUSE_S)

    def _close(self, transport: Transport | None) -> None:
        self._offered_digests.close()
        self._commands.clear()
        self._reads_to_start.clear()
        if transport is not None:
            try:
                transport.close()
            except TransportError as error:
                logger.error("transfer agent %s could not close its transport: %s", self.identity.name, error)

    def _run_once(self, transport: Transport) -> bool:
        """Perform actions, poll, report events. Returns whether anything moved or is about to."""
        num_commands = len(self._commands) + len(self._reads_to_start)
        for _ in range(len(self._commands)):
            action = self._commands.popleft()
            if isinstance(action, StartRead):
                self._reads_to_start.append(action)
            else:
                self._perform(transport, action)
        if self._reads_to_start:
            # One only, because over shared memory the start of a read copies its bytes. Messages, above all heartbeats,
            # wait for no other read, and the transport is polled between two reads.
            self._perform(transport, self._reads_to_start.popleft())
        self._end_read(transport, self._reads.take_turn(transport))
        self._offered_digests.send_ready()
        began_at = time.monotonic()
        for event in transport.poll():
            match event:
                case ReadDone(handle) | ReadBroken(handle) if self._prober.owns(handle):
                    self._end_probe(transport, event)
                case ReadDone(handle):
                    self._end_read(transport, self._reads.on_done(transport, handle))
                case ReadBroken(handle, error):
                    self._end_read(transport, self._reads.on_broken(transport, handle, error))
                case Notification(peer, payload):
                    self._receive(transport, peer, payload)
                case _:
                    assert_never(event)
        # After the poll, with the time before it: what ended while this thread was stopped has ended in time.
        for late in self._reads.time_out(transport, began_at):
            self._events.append(ReadTimedOut(late.action.read_id, late.timed_out))
        self._prober.time_out(transport, began_at)
        events, self._events = self._events, []
        if events:
            self._on_events(events)
        return bool(num_commands or events or transport.busy or self._reads.has_turns)

    def _perform(self, transport: Transport, action: AgentAction) -> None:
        match action:
            case Connect(peer):
                try:
                    transport.connect(peer)
                    self._peers[peer.name] = _ConnectedPeer(peer)
                except TransportError as error:
                    self._events.append(PeerLost(peer.name, str(error)))
            case Disconnect(peer):
                self._disconnect(transport, peer)
            case SendMessage(peer, message):
                self._send(transport, peer, message)
            case StartRead():
                self._start_read(transport, action)
            case ComputeDigests(blocks):
                self._offered_digests.compute(blocks)
            case ProbePath(peer):
                if peer in self._peers:
                    self._events += self._prober.start(transport, self._peers[peer].address, action)
                else:
                    self._events.append(ProbeFailed(peer, "not connected"))
            case LogPath(path):
                log_path(self.identity.name, path)
            case _:
                assert_never(action)

    def _end_probe(self, transport: Transport, end: ReadDone | ReadBroken) -> None:
        event = self._prober.end(end)
        self._events.append(event)
        if isinstance(end, ReadBroken) and isinstance(end.error, PeerDisconnected):
            self._report_lost(transport, event.peer, str(end.error))

    def _send(self, transport: Transport, peer: str, message: HandoffMessage) -> None:
        if isinstance(message, Ready) and peer in self._peers:

            def with_digests(digests: Digests) -> None:
                blocks = replace(message.blocks, digests=digests) if digests else message.blocks
                self._notify(transport, peer, replace(message, blocks=blocks))

            self._offered_digests.when_ready(message, self._peers[peer].address.layout, with_digests)
        else:
            self._notify(transport, peer, message)

    def _notify(self, transport: Transport, peer: str, message: HandoffMessage) -> None:
        if peer not in self._peers:
            return  # the machine gets a PeerLost of this peer
        try:
            transport.notify(peer, encode(message))
        except TransportError as error:
            self._report_lost(transport, peer, str(error))

    def _start_read(self, transport: Transport, action: StartRead) -> None:
        began_at = time.monotonic()  # now: over shared memory the copy happens inside start_read
        peer = self._peers.get(action.peer)
        if peer is None:
            self._events.append(ReadFailed(action.read_id, AbortReason.PEER_LOST, f"not connected to {action.peer}"))
            return
        if peer.plan is None:
            peer.plan = TransferPlan(peer.address.layout, self.pool.layout)
        if peer.plan.moves_whole_blocks is bool(action.pieces):  # a router has named two layouts for one agent
            detail = f"connected to {action.peer} with another KV layout"
            self._events.append(ReadFailed(action.read_id, AbortReason.PEER_LOST, detail))
            self._report_lost(transport, action.peer, detail)
            return
        self._end_read(transport, self._reads.start(transport, action, peer.plan, began_at))

    def _end_read(self, transport: Transport, read: Read | None) -> None:
        """Report a read where it has ended."""
        if read is None:
            return
        now, began_at = time.monotonic(), read.began_at
        peer = self._peers.get(read.action.peer)
        if peer is not None:
            began_at, peer.read_ended_at = max(began_at, peer.read_ended_at), now
        self._events.append(read.result(now - began_at))
        if read.peer_is_gone:
            self._report_lost(transport, read.action.peer, str(read.error))

    def _report_lost(self, transport: Transport, peer: str, detail: str) -> None:
        """Disconnect and report a `PeerLost`, once for each connection, however many operations fail."""
        if peer in self._peers:
            self._disconnect(transport, peer)
            self._events.append(PeerLost(peer, detail))

    def _disconnect(self, transport: Transport, peer: str) -> None:
        self._peers.pop(peer, None)
        self._reads.lose(peer)
        transport.disconnect(peer)  # the next poll reports its reads as broken

    def _receive(self, transport: Transport, peer: str, payload: bytes) -> None:
        try:
            if len(peer) > MAX_NAME_CHARS:  # the sender chooses it, and the owner keeps it beside early messages
                raise MalformedMessage(f"the name of its sender has {len(peer)} characters")
            self._events.append(MessageReceived(peer, decode(payload)))
        except MalformedMessage as error:
            self.num_malformed += 1
            if self.num_malformed.bit_count() == 1:  # the 1st, 2nd, 4th, ...: no peer can fill the log
                sender = peer[:MAX_NAME_CHARS]
                logger.warning("dropped malformed message %d, from %r: %s", self.num_malformed, sender, error)
            if isinstance(error, OtherVersion):
                self._refuse_version(transport, peer, error)

    def _refuse_version(self, transport: Transport, peer: str, error: OtherVersion) -> None:
        """Send the peer our version, once for each connection, and disconnect. So both sides fail their transfers at
        once, and not after unanswered heartbeats."""
        if peer not in self._peers:
            return
        with contextlib.suppress(TransportError):
            transport.notify(peer, encode_version())
        self._report_lost(transport, peer, str(error))
