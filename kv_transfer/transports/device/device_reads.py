"""The interface of a way to read from peers. A DeviceTransport has one for each path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.handoff import AgentAddress
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.transport import ReadEnd


class DeviceReads(Protocol):
    """The laws of reads in kv_transfer/transports/transport.py hold. Handles are given by the caller."""

    def connect(self, peer: AgentAddress) -> None: ...

    def disconnect(self, peer: str) -> None:
        """Reads from the peer break."""

    def start(self, handle: int, peer: str, runs: Runs) -> None:
        """Start a read. The peer is connected, and the caller has checked the runs."""

    def start_blocks(self, handle: int, peer: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """`start` for whole blocks, equally large in both pools."""

    def try_complete(self, handle: int) -> bool: ...

    def cancel(self, handle: int) -> None: ...

    def poll(self) -> list[ReadEnd]: ...

    @property
    def busy(self) -> bool:
        """Whether a read has not ended."""
        ...

    def close(self) -> None: ...
