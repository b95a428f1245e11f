"""Two transports that are connected, in the hands of a test."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.transport import PoolMemory, ReadDone, Transport, TransportEvent
from tests.integration.transfer_owner_process import LAYOUT, NUM_BLOCKS, address_of, host_pool, known_bytes

SIZE = LAYOUT.block_bytes
PATIENCE_S = 20.0  # for a busy machine

OpenPool = Callable[[], tuple[np.ndarray, PoolMemory]]


class Ends:
    """Two connected transports and their pools; `a` owns known bytes, `b` reads."""

    def __init__(self, open_transport: Callable[[str], Transport], open_pool: OpenPool = host_pool) -> None:
        self.a, self.b = open_transport("a"), open_transport("b")
        self.bytes_a, self.pool_a = open_pool()
        self.bytes_b, self.pool_b = open_pool()
        for block in range(NUM_BLOCKS):
            self.bytes_a[block] = known_bytes(block)
        self.a.register(self.pool_a)
        self.b.register(self.pool_b)
        self.address_a, self.address_b = address_of(self.a, self.pool_a), address_of(self.b, self.pool_b)
        self.a.connect(self.address_b)
        self.b.connect(self.address_a)

    def poll_until(self, enough: Callable[[list[TransportEvent]], bool]) -> list[TransportEvent]:
        """The reports of `b`, while both poll, until there are enough."""
        events: list[TransportEvent] = []
        deadline = time.monotonic() + PATIENCE_S
        while not enough(events):
            assert time.monotonic() < deadline, f"not enough after {PATIENCE_S} s: {events}"
            self.a.poll()
            events += self.b.poll()
        return events

    def read(self, runs: list[ByteRun]) -> None:
        handle = self.b.start_read("a", runs)
        assert self.poll_until(bool) == [ReadDone(handle)]


def blocks(pairs: list[tuple[int, int]]) -> list[ByteRun]:
    return [ByteRun(source * SIZE, target * SIZE, SIZE) for source, target in pairs]
