"""Any transport with faults: a share of its operations fails, as a seed decides.

Half of the faults are errors of a call, and one error in four reports that the peer is gone. The other half are silent:
a notification lost, doubled or late, a completed read with a wrong bit.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import compose
from core.config import TandemConfig
from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole
from fleet.host.service_host import Placement
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.transport import Notification, PoolMemory, ReadBroken, ReadDone, Transport, TransportEvent
from tests.support.eager_reads import eager_reads
from worker.service import WorkerService

LATE_POLLS = 20
ODD_FATES: tuple[tuple[str, Sequence[int]], ...] = (("lost", ()), ("doubled", (0, 0)), ("late", (LATE_POLLS,)))
KINDS = ("error", "peer gone", "flipped bit", *(name for name, _ in ODD_FATES))


@dataclass
class Faults:
    """Of all transports that `opening` opens, in every process."""

    log: Path  # gets a line for each operation, and one for each fault
    seed: int
    rate: float  # share of the operations that fail

    def opening(self, open_transport: Callable[..., Transport]) -> Callable[..., Transport]:
        return lambda *arguments, **options: UnreliableTransport(open_transport(*arguments, **options), self)

    def done(self) -> Counter[str]:
        """By kind; "(operations)" is the number of operations."""
        return Counter(self.log.read_text().splitlines())


class UnreliableTransport:
    """A `Transport` around another one. Notifications meet their faults where they arrive."""

    def __init__(self, transport: Transport, faults: Faults) -> None:
        self.name, self.busy = transport.name, transport.busy
        self._transport, self._faults = transport, faults
        self._random = random.Random(f"{faults.seed} {self.name.partition('.')[0]}")  # without the incarnation
        self._log = os.open(faults.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._pool: PoolMemory | None = None
        self._peers: dict[str, AgentAddress] = {}
        self._runs: dict[int, Runs] = {}  # of the reads that have not ended, by handle
        self._late: list[tuple[int, Notification]] = []  # and the polls until it arrives

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._transport.register(pool)

    def metadata(self) -> bytes:
        return self._transport.metadata()

    def connect(self, peer: AgentAddress) -> None:
        self._begin_operation(peer.name)
        self._transport.connect(peer)
        self._peers[peer.name] = peer

    def disconnect(self, peer: str) -> None:
        self._transport.disconnect(peer)

    def start_read(self, peer: str, runs: Runs) -> int:
        self._begin_operation(peer)
        handle = self._transport.start_read(peer, runs)
        self._runs[handle] = runs
        return handle

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert self._pool is not None
        self._begin_operation(peer)
        handle = self._transport.start_block_read(peer, sources, targets)
        self._runs[handle] = self._pool.block_runs(self._peers[peer], sources, targets)
        return handle

    def try_complete(self, handle: int) -> bool:
        if not self._transport.try_complete(handle):
            return False
        self._complete(handle)
        return True

    def cancel(self, handle: int) -> None:
        self._transport.cancel(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        self._begin_operation(peer)
        self._transport.notify(peer, payload)

    def poll(self) -> list[TransportEvent]:
        self._late = [(polls_left - 1, notification) for polls_left, notification in self._late]
        events: list[TransportEvent] = []
        for event in self._transport.poll():
            match event:
                case Notification():
                    self._late += [(polls, event) for polls in self._fate()]
                    continue
                case ReadDone(handle):
                    self._complete(handle)
                case ReadBroken(handle):
                    del self._runs[handle]
            events.append(event)
        self.busy = self._transport.busy
        events += [notification for polls_left, notification in self._late if polls_left <= 0]
        self._late = [each for each in self._late if each[0] > 0]
        return events

    def close(self) -> None:
        try:
            self._transport.close()
        finally:
            os.close(self._log)

    # ---- faults

    def _begin_operation(self, peer: str) -> None:
        self._note("(operations)")
        if not self._strikes():
            return
        if self._random.random() < 0.25:
            self._note("peer gone")
            raise PeerDisconnected(f"{peer} is gone")
        self._note("error")
        raise TransportError("this operation fails")

    def _fate(self) -> Sequence[int]:
        """After how many polls a notification arrives, each time."""
        if not self._strikes():
            return (0,)
        name, fate = self._random.choice(ODD_FATES)
        self._note(name)
        return fate

    def _complete(self, handle: int) -> None:
        """A bit may flip before anybody reads the targets."""
        runs = self._runs.pop(handle)
        if self._strikes():
            assert self._pool is not None
            assert self._pool.view is not None, "this fault needs a pool in host memory"
            _, target, num_bytes = self._random.choice(runs)
            self._pool.view[target + self._random.randrange(num_bytes)] ^= 1 << self._random.randrange(8)
            self._note("flipped bit")

    def _strikes(self) -> bool:
        return self._random.random() < self._faults.rate / 2

    def _note(self, what: str) -> None:
        os.write(self._log, f"{what}\n".encode())  # one call, so that lines of several processes do not mix


def build_worker(role: ServiceRole, faults: Faults, config: TandemConfig, placement: Placement) -> WorkerService:
    """A `ServiceFactory` for a process of its own, whose transport is unreliable. It reads prefixes eagerly."""
    builders = {ServiceRole.PREFILL: compose.build_prefill_worker, ServiceRole.DECODE: compose.build_decode_worker}
    compose.open_transport = faults.opening(compose.open_transport)
    read_eagerly()
    return builders[role](config, placement)


def build_eager_router(config: TandemConfig, placement: Placement, cache_dir: Path | None = None) -> Any:
    """As `compose.build_router`, in a process of its own, whose router lets workers read prefixes eagerly."""
    read_eagerly()
    return compose.build_router(config, placement, cache_dir)


def read_eagerly() -> None:
    """Until this process ends."""
    for change in eager_reads():
        change.start()
