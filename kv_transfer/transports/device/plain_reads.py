"""Reads that another transport performs, from the peer's pool into ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.handoff import AgentAddress
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.transport import Notification, ReadBroken, ReadEnd, Transport, read_end


class PlainReads:
    """`address_of` turns a peer's address into its address for the other transport.

    `shared`: the transport has another user, which connects, polls it and passes the ends of our reads to `on_end`.
    """

    def __init__(self, transport: Transport, address_of: Callable[[AgentAddress], AgentAddress], shared: bool) -> None:
        self._transport = transport
        self._address_of = address_of
        self._shared = shared
        self._names: dict[str, str] = {}  # names of connected peers -> their names in the other transport
        self._theirs: dict[int, int] = {}  # our handles -> handles of the other transport
        self._ours: dict[int, int] = {}  # the reverse

    @property
    def busy(self) -> bool:
        return bool(self._theirs) or (not self._shared and self._transport.busy)

    def connect(self, peer: AgentAddress) -> None:
        address = self._address_of(peer)
        if not self._shared:
            self._transport.connect(address)
        self._names[peer.name] = address.name

    def disconnect(self, peer: str) -> None:
        name = self._names.pop(peer, None)
        if name is not None and not self._shared:
            self._transport.disconnect(name)

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        self._record(handle, self._transport.start_read(self._names[peer], runs))

    def start_blocks(self, handle: int, peer: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._record(handle, self._transport.start_block_read(self._names[peer], sources, targets))

    def try_complete(self, handle: int) -> bool:
        theirs = self._theirs[handle]
        if not self._transport.try_complete(theirs):
            return False
        self._forget(theirs)
        return True

    def cancel(self, handle: int) -> None:
        if handle in self._theirs:
            self._transport.cancel(self._theirs[handle])

    def poll(self) -> list[ReadEnd]:
        if self._shared:
            return []
        events = self._transport.poll()
        return [self.on_end(event) for event in events if not isinstance(event, Notification)]

    def on_end(self, event: ReadEnd) -> ReadEnd:
        handle = self._forget(event.handle)
        return read_end(handle, event.error if isinstance(event, ReadBroken) else None)

    def close(self) -> None:
        if not self._shared:
            self._transport.close()

    def _record(self, handle: int, theirs: int) -> None:
        self._theirs[handle] = theirs
        self._ours[theirs] = handle

    def _forget(self, theirs: int) -> int:
        handle = self._ours.pop(theirs)
        del self._theirs[handle]
        return handle
