"""Reads over UCX by ucxx, for sites that bring their own UCX.

- The transport connects once to each peer, at the peer's listener: only such endpoints report the death of a peer at
  once. UCX uses shared memory for them only where OPTIONS say that these transports can report errors.
- The first message on a connection names its sender. Reads start once that message has left: only then does UCX know
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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from core.errors import PeerDisconnected, TransportError
from core.handoff import MAX_NAME_CHARS, AgentAddress
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.host_address import HostAddresses, pick_address
from kv_transfer.transports.poll_time import PollTime
from kv_transfer.transports.transport import Notification, PoolMemory, TransportEvent, check_runs, read_end
from protos.handoff_codec import MAX_MESSAGE_BYTES

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
    # The kernel's copy between processes reports no errors during a rendezvous, so UCX uses the copy for such
    # connections only where rendezvous is off. Our messages are small and need none.
    "RNDV_THRESH": "inf",
    "CMA_SEG_SIZE": "64m",  # of one such copy; UCX's default of 512 KB costs 8 % of the speed of 2 MiB blocks
    "CMA_TX_QUOTA": "64",  # copies in a row: Python code between two copies would run with cold caches
}
MAX_GETS_IN_FLIGHT = 64  # gets of a read; a run is one get; beyond: they wait
MAX_CONNECTIONS = 1024  # connections from peers; beyond: a new one is closed, and the oldest name is forgotten
MAX_ACCEPTS = 16  # connection requests that one poll accepts, of about a millisecond each; beyond: the next poll
MAX_STEPS = 16  # of progress in a row: while bytes arrive over TCP, progress would not end
CONNECT_TIMEOUT_S = 5.0
CANCEL_GRACE_S = 0.5  # a cancelled read that has not ended by then takes its connection with it
CLOSE_TIMEOUT_S = 0.5  # for the last notifications to leave
# UCX 1.21 crashes if a listener is freed while a peer connects, so the process keeps its listeners until it ends.
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
class _Outgoing:
    """A connection from us to a peer."""

    address: AgentAddress
    endpoint: Any
    tag: int
    packed_key: bytes
    connect_by: float
    # Requests and their bytes, which UCX may still read, oldest first; the very first is the hello.
    sends: deque[tuple[Any, np.ndarray]] = field(default_factory=deque)
    key: RemoteKey | None = None  # None before the connection is made
    closed: str = ""  # why


@dataclass(slots=True, eq=False)
class _UcxRead:
    connection: _Outgoing
    runs: deque[tuple[int, int, int]]  # not started yet: source, target, length
    gets: deque[int] = field(default_factory=deque)  # requests in flight, oldest first
    broken: TransportError | None = None
    end_by: float = math.inf  # of a cancelled read


@dataclass(slots=True)
class _Incoming:
    """A connection from a peer to us. Its tag identifies it."""

    name: str = ""  # of the peer; empty before the hello, and once it is forgotten
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
        self._outgoing: dict[str, _Outgoing] = {}  # by the peer's name
        self._reads: dict[int, _UcxRead] = {}
        self._handles = count()
        self._requests: deque[int] = deque()  # connection requests from the listener
        self._num_refused = 0  # of these, no endpoint could be made
        self._accepted: list[Any] = []  # endpoints; dropping one closes it
        self._incoming: dict[int, _Incoming] = {}  # by tag, oldest first
        with _errors_mapped("start ucxx"):
            self._context: Any = ucx.UCXContext(OPTIONS, feature_flags=(ucx.Feature.TAG, ucx.Feature.RMA))
            self._worker: Any = ucx.UCXWorker(self._context)
            self._listener: Any = ucx.UCXListener.create(self._worker, 0, self._requests.append)

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        if pool.memory is not None:
            pool.memory.enter()  # UCX registers and reads memory of the device that is current in its thread
        self._memory = UcpMemory(self._context.handle, pool.address, pool.num_bytes, pool.device)

    def metadata(self) -> bytes:
        assert self._memory is not None
        about = {"port": self._listener.port, "key": self._memory.packed_key().hex(), "at": self._addresses.encode()}
        return json.dumps(about).encode()

    def connect(self, peer: AgentAddress) -> None:
        self.disconnect(peer.name)
        host, port, key = self._decode(peer)
        with _errors_mapped(f"connect to {peer.name}"):
            endpoint = self._worker.create_endpoint_from_hostname(host, port, endpoint_error_handling=True)
        connect_by = time.monotonic() + self._connect_timeout_s
        connection = _Outgoing(peer, endpoint, secrets.randbits(64), key, connect_by)
        self._outgoing[peer.name] = connection
        self._send(connection, _HELLO + self.name.encode())

    def disconnect(self, peer: str) -> None:
        connection = self._outgoing.pop(peer, None)
        if connection is not None:
            self._close_connection(connection, f"disconnected from {peer}")

    def start_read(self, peer: str, runs: Runs) -> int:
        connection = self._connected(peer)
        assert self._pool is not None
        check_runs(runs, connection.address, self._pool)
        theirs, ours = connection.address.pool_base, self._pool.address
        gets = deque((theirs + source, ours + target, num_bytes) for source, target, num_bytes in runs)
        handle = next(self._handles)
        read = self._reads[handle] = _UcxRead(connection, gets)
        if connection.key is not None:
            self._start_gets(read)
            self._progress(until_ended=read)
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert self._pool is not None
        return self.start_read(peer, self._pool.block_runs(self._connected(peer).address, sources, targets))

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
        for connection in [connection for connection in self._outgoing.values() if not connection.closed]:
            self._update_connection(connection)
        events: list[TransportEvent] = []
        for handle, read in list(self._reads.items()):
            if self._has_ended(read):
                del self._reads[handle]
                events.append(read_end(handle, read.broken))
        return events + self._receive()

    def close(self) -> None:
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while any(known.sends and not known.closed for known in self._outgoing.values()):
            if time.monotonic() >= give_up_at:
                break
            self.poll()
        for name in list(self._outgoing):
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
        """Accept connection requests, and close the endpoints of peers that are gone, and of new ones above the
        limit. UCX keeps a request until it has an endpoint."""
        for endpoint in [endpoint for endpoint in self._accepted if not endpoint.alive]:
            endpoint.close_blocking()
            self._accepted.remove(endpoint)
        for _ in range(min(len(self._requests), MAX_ACCEPTS)):
            try:
                endpoint = self._listener.create_endpoint_from_conn_request(self._requests.popleft(), True)
                if len(self._accepted) < MAX_CONNECTIONS:
                    self._accepted.append(endpoint)
                else:
                    endpoint.close_blocking()
            except ucx.UCXError as error:
                self._num_refused += 1
                if self._num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, ...: no peer can fill the log
                    logger.warning("%d connections to %s failed, the last: %s", self._num_refused, self.name, error)

    def _decode(self, peer: AgentAddress) -> tuple[str, int, bytes]:
        """Host and port to connect to, and the packed key of the pool."""
        try:
            about = json.loads(peer.metadata)
            port, key, theirs = int(about["port"]), bytes.fromhex(about["key"]), HostAddresses.decode(about["at"])
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"the metadata of {peer.name} is not that of a ucxx transport: {error}") from error
        return pick_address(self._addresses, theirs), port, key

    def _connected(self, peer: str) -> _Outgoing:
        connection = self._outgoing.get(peer)
        if connection is None:
            raise TransportError(f"not connected to {peer}")
        if connection.closed or not connection.endpoint.alive:
            raise PeerDisconnected(f"{peer} is gone: {connection.closed or 'the connection broke'}")
        return connection

    def _send(self, connection: _Outgoing, message: bytes) -> None:
        with _errors_mapped(f"notify {connection.address.name}"):
            data = np.frombuffer(message, np.uint8)
            connection.sends.append((connection.endpoint.tag_send(Array(data), Tag(connection.tag)), data))

    def _update_connection(self, connection: _Outgoing) -> None:
        """Complete sends, finish connecting, and close a broken connection."""
        try:
            while connection.sends and connection.sends[0][0].completed:
                connection.sends.popleft()[0].check_error()
                if connection.key is None:
                    assert self._memory is not None
                    connection.key = self._memory.unpack(connection.endpoint.handle, connection.packed_key)
        except (ucx.UCXError, TransportError) as error:
            self._close_connection(connection, str(error))
            return
        if not connection.endpoint.alive:
            self._close_connection(connection, "the connection broke")
        elif connection.key is None and time.monotonic() > connection.connect_by:
            self._close_connection(connection, f"no connection within {self._connect_timeout_s} s")

    def _close_connection(self, connection: _Outgoing, why: str) -> None:
        """Close a connection. None of its reads writes into our pool afterwards."""
        connection.closed = connection.closed or why
        for read in self._reads.values():
            if read.connection is connection:
                read.broken = read.broken or PeerDisconnected(f"{connection.address.name}: {why}")
                read.runs.clear()
        connection.endpoint.close_blocking()
        if connection.key is not None:
            assert self._memory is not None
            self._memory.forget(connection.key)
            connection.key = None
        connection.sends.clear()

    # ---- reads

    def _progress(self, until_ended: _UcxRead | None = None) -> bool:
        """Whether UCX progressed. Over shared memory UCX copies here. An error of UCX ends the transport."""
        for step in range(MAX_STEPS):
            if not self._worker.progress_once():
                return step > 0
            if until_ended is not None and self._has_ended(until_ended):
                break
        return True

    def _start_gets(self, read: _UcxRead) -> None:
        assert read.connection.key is not None
        assert self._memory is not None
        try:
            self._memory.get(read.connection.key, read.runs, read.gets, MAX_GETS_IN_FLIGHT)
        except TransportError as error:
            self._break(read, error)

    def _has_ended(self, read: _UcxRead) -> bool:
        """Whether no run of the read is in flight or left to start."""
        assert self._memory is not None
        while status := self._memory.forget_ended(read.gets):
            self._break(read, failure(status, f"read from {read.connection.address.name}"))
        if read.broken is not None:
            read.runs.clear()
            if read.gets and time.monotonic() > read.end_by and not read.connection.closed:
                self._close_connection(read.connection, "a cancelled read did not end")
        elif read.runs and read.connection.key is not None:
            self._start_gets(read)
        return not read.gets and not read.runs

    def _break(self, read: _UcxRead, error: TransportError) -> None:
        if not read.connection.endpoint.alive and not isinstance(error, PeerDisconnected):
            error = PeerDisconnected(str(error))
        read.broken = read.broken or error
        read.runs.clear()

    # ---- notifications

    def _receive(self) -> list[TransportEvent]:
        with _errors_mapped("take notifications"):
            while (probe := self._worker.tag_probe(Tag(0), TagMask(0), remove=True)).matched:
                # UCX ends the receive of a longer message with an error. Its sender chooses the length.
                buffer = np.empty(min(probe.length, 1 + MAX_MESSAGE_BYTES), np.uint8)
                request = self._worker.tag_recv_with_handle(Array(buffer), probe)
                self._incoming.setdefault(probe.sender_tag.value, _Incoming()).receives.append((request, buffer))
                self.busy = True
        notifications: list[TransportEvent] = []
        for tag, connection in list(self._incoming.items()):
            while connection.receives and connection.receives[0][0].completed:
                request, buffer = connection.receives.popleft()
                try:
                    request.check_error()
                except ucx.UCXError:
                    continue  # the sender has died, or the message is too long
                kind, payload = buffer[:1].tobytes(), buffer[1:].tobytes()
                if kind == _HELLO:
                    connection.name = payload[:MAX_NAME_CHARS].decode(errors="replace")  # the sender chooses its length
                    self._forget_older(tag, connection.name)
                elif kind == _NOTIFICATION and connection.name:
                    notifications.append(Notification(connection.name, payload))
            if not connection.name and not connection.receives:
                self._incoming.pop(tag, None)  # it is forgotten, or has begun with another message than the hello
        return notifications

    def _forget_older(self, tag: int, name: str) -> None:
        """Forget the names of older connections from a peer, and the oldest of all names above the limit. `_receive`
        removes such a connection when its receives have ended: until then UCX writes into their buffers."""
        others = [known for other, known in self._incoming.items() if other != tag and known.name]
        num_above = len(others) + 1 - MAX_CONNECTIONS
        for place, known in enumerate(others):
            if known.name == name or place < num_above:
                known.name = ""
