"""The owner's half of a staged read: copy asked-for runs of the device's pool into slots that the reader reads.

    Ask --slot free--> copying --Staged--> readable --Done, or end of the slot's lease--> free
        `-- queue, bounded for each reader

A reader that died or lost its connection may still read a slot. So only the reader's Done and the end of LEASE_S free a
readable slot. The reader counts LEASE_S from its Ask (kv_transfer/transports/device/staged_reads.py), and trusts no
read that ended later.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import TransportError
from kv_transfer.device.device_memory import Copy, DeviceMemory
from kv_transfer.transports.device.staging_messages import Ask, Refused, Staged, StagingMessage, packed
from kv_transfer.transports.device.staging_ring import StagingRing
from kv_transfer.transports.transport import PoolMemory

LEASE_S = 20.0
MAX_ASKED = 64  # slices of one reader that wait or are staged; beyond: refused

logger = logging.getLogger(__name__)

Send = Callable[[str, StagingMessage], None]


@dataclass(slots=True)
class _QueuedAsk:
    reader: str
    ask: Ask
    at: float


@dataclass(slots=True)
class _UsedSlot:
    number: int
    asked: _QueuedAsk
    copy: int | None  # handle of the copy in flight
    lease_until: float = 0.0
    is_done: bool = False  # the reader's Done came before the end of the copy


class StagingOwner:
    def __init__(self, memory: DeviceMemory, pool: PoolMemory, ring: StagingRing, send: Send) -> None:
        """`send` raises `TransportError` where the reader is gone."""
        self._memory = memory
        self._pool = pool
        self._ring = ring
        self._send = send
        self._waiting: deque[_QueuedAsk] = deque()  # oldest first
        self._slots: dict[tuple[str, int], _UsedSlot] = {}  # by reader and slice
        self._num_asked: Counter[str] = Counter()  # by reader

    @property
    def busy(self) -> bool:
        """Whether a copy is in flight."""
        return any(slot.copy is not None for slot in self._slots.values())

    def on_ask(self, reader: str, ask: Ask, now: float) -> None:
        refusal = self._refusal(reader, ask)
        if refusal:
            self._try_send(reader, Refused(ask.slice_id, refusal))
            return
        self._num_asked[reader] += 1
        self._waiting.append(_QueuedAsk(reader, ask, now))
        self._start_copies()

    def on_done(self, reader: str, slice_id: int) -> None:
        slot = self._slots.get((reader, slice_id))
        if slot is None:
            self._drop_waiting(lambda asked: (asked.reader, asked.ask.slice_id) == (reader, slice_id))
        elif slot.copy is not None:
            slot.is_done = True
        else:
            self._free(slot)

    def forget(self, reader: str) -> None:
        """Drop the queued Asks of a reader whose connection is gone."""
        self._drop_waiting(lambda asked: asked.reader == reader)

    def poll(self, now: float) -> None:
        for slot in list(self._slots.values()):
            if slot.copy is not None:
                if self._memory.has_ended(slot.copy):
                    slot.copy = None
                    self._end_copy(slot, now)
            elif now >= slot.lease_until:
                self._free(slot)
        self._start_copies()

    # ---- inside

    def _refusal(self, reader: str, ask: Ask) -> str:
        if any(first + num_bytes > self._pool.num_bytes for first, num_bytes in ask.runs):
            return "a run is outside the pool"
        if sum(num_bytes for _, num_bytes in ask.runs) > self._ring.slot_bytes:
            return f"more than a slot of {self._ring.slot_bytes} bytes"
        if self._num_asked[reader] >= MAX_ASKED or (reader, ask.slice_id) in self._slots:
            return f"{self._num_asked[reader]} slices are staged already"
        return ""

    def _start_copies(self) -> None:
        while self._waiting and self._ring.for_readers:
            asked = self._waiting.popleft()
            number = self._ring.for_readers.popleft()
            places = packed(asked.ask.runs, self._ring.address(number))
            slot = _UsedSlot(number, asked, None)
            self._slots[asked.reader, asked.ask.slice_id] = slot
            slot.copy = self._memory.start_copies([Copy(self._pool.address + at, to, size) for at, to, size in places])

    def _end_copy(self, slot: _UsedSlot, now: float) -> None:
        asked = slot.asked
        staged = Staged(asked.ask.slice_id, slot.number, now - asked.at)
        if slot.is_done or not self._try_send(asked.reader, staged):
            self._free(slot)
        slot.lease_until = now + LEASE_S

    def _free(self, slot: _UsedSlot) -> None:
        self._ring.for_readers.append(slot.number)
        del self._slots[slot.asked.reader, slot.asked.ask.slice_id]
        self._count_down(slot.asked.reader)

    def _drop_waiting(self, drops: Callable[[_QueuedAsk], bool]) -> None:
        for asked in [asked for asked in self._waiting if drops(asked)]:
            self._waiting.remove(asked)
            self._count_down(asked.reader)

    def _count_down(self, reader: str) -> None:
        self._num_asked[reader] -= 1
        if not self._num_asked[reader]:
            del self._num_asked[reader]

    def _try_send(self, reader: str, message: StagingMessage) -> bool:
        try:
            self._send(reader, message)
        except TransportError as error:
            logger.debug("a staged slice was not announced to %s: %s", reader, error)
            return False
        return True

    def check(self) -> None:
        """Every slot for readers is free or in use, once; the counts are those of the tables."""
        used = [slot.number for slot in self._slots.values()]
        numbers = sorted([*used, *self._ring.for_readers])
        assert numbers == list(range(len(numbers)))
        counted = Counter(asked.reader for asked in self._waiting)
        counted.update(slot.asked.reader for slot in self._slots.values())
        assert counted == self._num_asked
