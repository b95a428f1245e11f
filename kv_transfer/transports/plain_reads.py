"""Reads that a transport beneath does by itself, from the peer's pool into ours."""

from __future__ import annotations

from collections.abc import Callable

from core.handoff import AgentAddress
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.device_reads import ReadEnd
from kv_transfer.transports.transport import Notification, ReadBroken, ReadDone, Transport


class PlainReads:
    """`address_of` turns a peer's address into its address for the transport beneath.

    The transport may have another user: then the other user polls it and passes the ends of our reads to `on_end`.
    """

    def __init__(self, beneath: Transport, address_of: Callable[[AgentAddress], AgentAddress], shared: bool) -> None:
        self._beneath = beneath
        self._address_of = address_of
        self._shared = shared
        self._names: dict[str, str] = {}  # of connected peers -> names beneath
        self._handles: dict[int, int] = {}  # ours -> beneath
        self._ours: dict[int, int] = {}  # and back

    @property
    def busy(self) -> bool:
        return bool(self._handles) or (not self._shared and self._beneath.busy)

    def connect(self, peer: AgentAddress) -> None:
        address = self._address_of(peer)
        if not self._shared:
            self._beneath.connect(address)
        self._names[peer.name] = address.name

    def disconnect(self, peer: str) -> None:
        name = self._names.pop(peer, None)
        if name is not None and not self._shared:
            self._beneath.disconnect(name)

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        self._began(handle, self._beneath.start_read(self._names[peer], runs))

    def start_blocks(self, handle: int, peer: str, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self._began(handle, self._beneath.start_block_read(self._names[peer], sources, targets))

    def try_complete(self, handle: int) -> bool:
        beneath = self._handles[handle]
        if not self._beneath.try_complete(beneath):
            return False
        self._forget(beneath)
        return True

    def cancel(self, handle: int) -> None:
        if handle in self._handles:
            self._beneath.cancel(self._handles[handle])

    def poll(self) -> list[ReadEnd]:
        if self._shared:
            return []
        events = self._beneath.poll()
        return [self.on_end(event) for event in events if not isinstance(event, Notification)]

    def owns(self, beneath: int) -> bool:
        return beneath in self._ours

    def on_end(self, event: ReadEnd) -> ReadEnd:
        handle = self._forget(event.handle)
        return ReadDone(handle) if isinstance(event, ReadDone) else ReadBroken(handle, event.error)

    def close(self) -> None:
        if not self._shared:
            self._beneath.close()

    def _began(self, handle: int, beneath: int) -> None:
        self._handles[handle] = beneath
        self._ours[beneath] = handle

    def _forget(self, beneath: int) -> int:
        handle = self._ours.pop(beneath)
        del self._handles[handle]
        return handle
