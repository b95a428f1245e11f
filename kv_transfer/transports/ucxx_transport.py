"""Reads over UCX by ucxx, for sites that bring their own UCX.

- One connection to each peer, made at the peer's listener: only such endpoints report the death of a peer at once. UCX
  uses shared memory for them only where OPTIONS say that these transports can report errors.
- The first message on a connection names its sender. Reads wait until that message has left: before, UCX does not know
  the lanes of the connection, which the peer's key needs.
- Each connection has a random tag, so messages of an old connection do not match.
- A read is one ucp_get into the registered pool for each run. Over shared memory ucp_get copies before it returns; over
  TCP the peer's CPU takes part, so both sides must poll.
- There is no thread and no posted receive: `poll` probes for notifications and then receives them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress, PoolAccess
from core.paths import Lane
from kv_transfer.protocol.plan import Runs, runs_of_blocks
from kv_transfer.transports.host_address import HostAddresses, pick_address
from kv_transfer.transports.poll_time import PollTime
from kv_transfer.transports.transport import Notification, PoolMemory, ReadBroken, ReadDone, TransportEvent

_environment = dict(os.environ)
import ucxx._lib.libucxx as ucx  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402
from ucxx.types import Tag, TagMask  # noqa: E402

for _name in os.environ.keys() - _environment.keys():
    del os.environ[_name]  # ucxx sets options for every UCX of the process when it is imported; ours are in OPTIONS

from kv_transfer.transports.ucp_memory import RemoteKey, UcpMemory, failure  # noqa: E402

logger = logging.getLogger(__name__)

OPTIONS = {
    # Shared memory reports errors, so UCX may use it for connections that report the death of a peer.
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
    # The kernel's copy between processes reports no errors during a rendezvous, so UCX uses it for such connections
    # only where no message may be sent by rendezvous. Our messages are small.
    "RNDV_THRESH": "inf",
    "CMA_SEG_SIZE": "64m",  # of one such copy; UCX's default of 512 KB costs 8 % of the speed of 2 MiB blocks
    "CMA_TX_QUOTA": "64",  # copies in a row: Python code between two copies would run with cold caches
}
MAX_GETS_IN_FLIGHT = 64  # per read; a run is one get
MAX_CONNECTIONS = 1024  # from peers to us
MAX_STEPS = 16  # of progress in a row: while bytes arrive over TCP, progress would not end
CONNECT_TIMEOUT_S = 5.0
CANCEL_GRACE_S = 0.5  # a cancelled read that has not ended by then takes its connection with it
CLOSE_TIMEOUT_S = 0.5  # for the last notifications to leave
# UCX 1.21 crashes where a listener is freed while a peer connects, so listeners stay until the process ends.
_closed: list[tuple[Any, Any, Any]] = []
_HELLO, _NOTIFICATION = b"h", b"n"  # the first byte of a message


@contextmanager
def _errors_mapped(doing: str) -> Iterator[None]:
    try:
        yield
    except (ucx.UCXConnectionResetError, ucx.UCXUnreachableError, ucx.UCXNotConnectedError) as error:
        raise PeerDisconnected(f"{doing}: the peer is gone") from error
    except ucx.UCXError as error:
        raise TransportError(f"{doing}: {error}") from error


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection from us to a peer."""

    address: AgentAddress
    endpoint: Any
    tag: int
    packed_key: bytes
    pool_bytes: int
    connect_by: float
    # Requests and their bytes, which UCX may still read, oldest first; the very first is the hello.
    sends: deque[tuple[Any, np.ndarray]] = field(default_factory=deque)
    key: RemoteKey | None = None  # None until connected
    gone: str = ""  # why


@dataclass(slots=True, eq=False)
class _Read:
    peer: _Peer
    runs: deque[tuple[int, int, int]]  # not started yet: source, target, length
    gets: deque[int] = field(default_factory=deque)  # requests in flight, oldest first
    broken: TransportError | None = None
    end_by: float = math.inf  # of a cancelled read


@dataclass(slots=True)
class _Sender:
    """A connection from a peer to us, known by its tag."""

    name: str = ""  # known once its hello has come
    receives: deque[tuple[Any, np.ndarray]] = field(default_factory=deque)  # oldest first


class UcxxTransport:
    def __init__(self, name: str, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.name = name
        self.busy = False
        self._poll_time = PollTime()
        self._connect_timeout_s = connect_timeout_s
        self._addresses = HostAddresses.of_this_process()
        self._pool: PoolMemory | None = None
        self._memory: UcpMemory | None = None
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._next_handle = 0
        self._requests: deque[int] = deque()  # connection requests from the listener
        self._accepted: list[Any] = []  # endpoints; dropping one closes it
        self._senders: OrderedDict[int, _Sender] = OrderedDict()  # by tag, oldest first
        with _errors_mapped("start ucxx"):
            self._context: Any = ucx.UCXContext(OPTIONS, feature_flags=(ucx.Feature.TAG, ucx.Feature.RMA))
            self._worker: Any = ucx.UCXWorker(self._context)
            self._listener: Any = ucx.UCXListener.create(self._worker, 0, self._requests.append)

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._memory = UcpMemory(self._context.handle, pool.address, pool.num_bytes, pool.device)

    def metadata(self) -> bytes:
        assert self._memory is not None
        about = {"port": self._listener.port, "key": self._memory.packed_key().hex(), "at": self._addresses.encode()}
        return json.dumps(about).encode()

    def access(self) -> PoolAccess:
        assert self._pool is not None
        return PoolAccess(self._pool.device)

    def lane(self, peer: str) -> Lane:  # noqa: ARG002
        return Lane.UNKNOWN

    def connect(self, peer: AgentAddress) -> None:
        self.disconnect(peer.name)
        host, port, key = self._decode(peer)
        with _errors_mapped(f"connect to {peer.name}"):
            endpoint = self._worker.create_endpoint_from_hostname(host, port, endpoint_error_handling=True)
        connect_by = time.monotonic() + self._connect_timeout_s
        pool_bytes = peer.num_blocks * peer.layout.block_bytes + peer.probe_bytes
        known = _Peer(peer, endpoint, secrets.randbits(64), key, pool_bytes, connect_by)
        self._peers[peer.name] = known
        self._send(known, _HELLO + self.name.encode())

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._hang_up(known, f"disconnected from {peer}")

    def start_read(self, peer: str, runs: Runs) -> int:
        known = self._connected(peer)
        assert self._pool is not None
        theirs, ours, our_bytes = known.address.pool_base, self._pool.address, self._pool.num_bytes
        gets: deque[tuple[int, int, int]] = deque()
        for source, target, num_bytes in runs:
            if not 0 <= source <= known.pool_bytes - num_bytes:
                raise TransportError(f"a run is outside the pool of {peer}")
            if not 0 <= target <= our_bytes - num_bytes:
                raise TransportError("a run is outside our pool")
            gets.append((theirs + source, ours + target, num_bytes))
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        read = self._reads[handle] = _Read(known, gets)
        if known.key is not None:
            self._start_gets(read)
            self._progress(until_ended=read)
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert self._pool is not None
        return self.start_read(peer, runs_of_blocks(zip(sources, targets, strict=True), self._pool.layout.block_bytes))

    def try_complete(self, handle: int) -> bool:
        read = self._reads[handle]
        if not self._has_ended(read) or read.broken is not None:
            return False
        del self._reads[handle]
        return True

    def cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is not None and read.broken is None:
            read.broken, read.end_by = TransportError("cancelled"), time.monotonic() + CANCEL_GRACE_S

    def notify(self, peer: str, payload: bytes) -> None:
        self._send(self._connected(peer), _NOTIFICATION + payload)

    def poll(self) -> list[TransportEvent]:
        self._poll_time.begin()
        progressed = self._progress()
        self.busy = self._poll_time.end() or progressed
        self._accept()
        for peer in [peer for peer in self._peers.values() if not peer.gone]:
            self._look_after(peer)
        events: list[TransportEvent] = []
        for handle, read in list(self._reads.items()):
            if self._has_ended(read):
                del self._reads[handle]
                events.append(ReadDone(handle) if read.broken is None else ReadBroken(handle, read.broken))
        return events + self._receive()

    def close(self) -> None:
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while any(peer.sends and not peer.gone for peer in self._peers.values()) and time.monotonic() < give_up_at:
            self.poll()
        for name in list(self._peers):
            self.disconnect(name)
        for endpoint in self._accepted:
            endpoint.close_blocking()
        while self._reads and time.monotonic() < give_up_at + CLOSE_TIMEOUT_S:
            self.poll()
        if self._reads:
            raise TransportError(f"a cancelled read did not end within {CLOSE_TIMEOUT_S} s")
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._accepted.clear()
        _closed.append((self._listener, self._worker, self._context))

    # ---- connections

    def _accept(self) -> None:
        """Accept connection requests, and close connections of peers that are gone."""
        for endpoint in [endpoint for endpoint in self._accepted if not endpoint.alive]:
            endpoint.close_blocking()
            self._accepted.remove(endpoint)
        while self._requests and len(self._accepted) < MAX_CONNECTIONS:
            try:
                request = self._requests.popleft()
                self._accepted.append(self._listener.create_endpoint_from_conn_request(request, True))
            except ucx.UCXError as error:
                logger.warning("a peer could not connect to %s: %s", self.name, error)

    def _decode(self, peer: AgentAddress) -> tuple[str, int, bytes]:
        """Host and port to connect to, and the packed key of the pool."""
        try:
            about = json.loads(peer.metadata)
            port, key, theirs = int(about["port"]), bytes.fromhex(about["key"]), HostAddresses.decode(about["at"])
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"the metadata of {peer.name} is not that of a ucxx transport: {error}") from error
        return pick_address(self._addresses, theirs), port, key

    def _connected(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"not connected to {peer}")
        if known.gone or not known.endpoint.alive:
            raise PeerDisconnected(f"{peer} is gone: {known.gone or 'the connection broke'}")
        return known

    def _send(self, peer: _Peer, message: bytes) -> None:
        with _errors_mapped(f"notify {peer.address.name}"):
            data = np.frombuffer(message, np.uint8)
            peer.sends.append((peer.endpoint.tag_send(Array(data), Tag(peer.tag)), data))

    def _look_after(self, peer: _Peer) -> None:
        """Complete sends, finish connecting, and notice a broken connection."""
        try:
            while peer.sends and peer.sends[0][0].completed:
                peer.sends.popleft()[0].check_error()
                if peer.key is None:
                    assert self._memory is not None
                    peer.key = self._memory.unpack(peer.endpoint.handle, peer.packed_key)
        except (ucx.UCXError, TransportError) as error:
            self._hang_up(peer, str(error))
            return
        if not peer.endpoint.alive:
            self._hang_up(peer, "the connection broke")
        elif peer.key is None and time.monotonic() > peer.connect_by:
            self._hang_up(peer, f"no connection within {self._connect_timeout_s} s")

    def _hang_up(self, peer: _Peer, why: str) -> None:
        """Close the connection. From here on none of its reads writes into our pool."""
        peer.gone = peer.gone or why
        for read in self._reads.values():
            if read.peer is peer:
                read.broken = read.broken or PeerDisconnected(f"{peer.address.name}: {why}")
                read.runs.clear()
        peer.endpoint.close_blocking()
        if peer.key is not None:
            assert self._memory is not None
            self._memory.forget(peer.key)
            peer.key = None
        peer.sends.clear()

    # ---- reads

    def _progress(self, until_ended: _Read | None = None) -> bool:
        """Whether UCX progressed. Over shared memory it copies here. An error of UCX ends the transport."""
        for step in range(MAX_STEPS):
            if not self._worker.progress_once():
                return step > 0
            if until_ended is not None and self._has_ended(until_ended):
                break
        return True

    def _start_gets(self, read: _Read) -> None:
        assert read.peer.key is not None
        assert self._memory is not None
        try:
            self._memory.get(read.peer.key, read.runs, read.gets, MAX_GETS_IN_FLIGHT)
        except TransportError as error:
            self._break(read, error)

    def _has_ended(self, read: _Read) -> bool:
        """Whether none of its runs is in flight or left to start."""
        assert self._memory is not None
        while status := self._memory.forget_ended(read.gets):
            self._break(read, failure(status, f"read from {read.peer.address.name}"))
        if read.broken is not None:
            read.runs.clear()
            if read.gets and time.monotonic() > read.end_by and not read.peer.gone:
                self._hang_up(read.peer, "a cancelled read did not end")
        elif read.runs and read.peer.key is not None:
            self._start_gets(read)
        return not read.gets and not read.runs

    def _break(self, read: _Read, error: TransportError) -> None:
        if not read.peer.endpoint.alive and not isinstance(error, PeerDisconnected):
            error = PeerDisconnected(str(error))
        read.broken = read.broken or error
        read.runs.clear()

    # ---- notifications

    def _receive(self) -> list[TransportEvent]:
        with _errors_mapped("take notifications"):
            while (probe := self._worker.tag_probe(Tag(0), TagMask(0), remove=True)).matched:
                buffer = np.empty(probe.length, np.uint8)
                request = self._worker.tag_recv_with_handle(Array(buffer), probe)
                self._senders.setdefault(probe.sender_tag.value, _Sender()).receives.append((request, buffer))
                self.busy = True
        events: list[TransportEvent] = []
        for tag, sender in list(self._senders.items()):
            while sender.receives and sender.receives[0][0].completed:
                request, buffer = sender.receives.popleft()
                try:
                    request.check_error()
                except ucx.UCXError:
                    continue  # its sender died meanwhile
                self._take(tag, sender, buffer.tobytes(), events)
        return events

    def _take(self, tag: int, sender: _Sender, message: bytes, events: list[TransportEvent]) -> None:
        kind, payload = message[:1], message[1:]
        if kind == _HELLO:
            sender.name = payload.decode(errors="replace")
            for old, other in list(self._senders.items()):
                if old != tag and (other.name == sender.name or len(self._senders) > MAX_CONNECTIONS):
                    del self._senders[old]
        elif kind == _NOTIFICATION and sender.name:
            events.append(Notification(sender.name, payload))
