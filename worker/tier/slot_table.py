"""Which block lies in which slot of a disk tier, and which block gives up its slot for a new one.

A block is written only behind its parent, so the blocks on disk begin at the first block of their prompt. The least
valuable block gives up its slot, if the new one is worth more:

    value = age of the table when the block was written or last asked for + 1 + number of times it was asked for
    age   = the highest value that a block had when it gave up its slot

So uses count, and old uses count ever less. Every block of a worker has the same bytes, and about the same cost to
compute again; a block also carries the cost of all blocks behind it, which nothing reaches without it. Therefore no
block is worth more than its parent, and of equal blocks the last one of a chain goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored
from worker.tier.slot_file import StoredBlock


@dataclass(slots=True)
class _Row:
    name: bytes
    sequence_hash: int
    position: int
    value: int
    num_uses: int = 0

    @property
    def worth(self) -> tuple[int, int]:
        return self.value, -self.position


class SlotTable:
    """Pure; one owner. Slots are 0 .. num_slots - 1."""

    def __init__(self, num_slots: int, stored: Mapping[int, StoredBlock]) -> None:
        """`stored`: from the scan of the file. A block without its parent is dropped."""
        self.num_slots = num_slots
        self._rows: dict[int, _Row] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by name
        self._begun: dict[bytes, tuple[int, _Row]] = {}  # slots that are being written, by name
        self._heap: list[tuple[tuple[int, int], int]] = []  # worth, slot; some entries are out of date
        self._events: list[BlockEvent] = []
        self._age = max((block.value for block in stored.values()), default=0)
        self._next_number = 1 + max((block.number for block in stored.values()), default=0)
        for slot, block in sorted(stored.items(), key=lambda item: item[1].position):
            parent = self._row_of(block.parent)
            if parent is not None or not block.position:
                value = block.value if parent is None else min(block.value, parent.value)
                self._enter(slot, _Row(block.name, block.sequence_hash, block.position, value))
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in self._rows]

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._rows)

    def sequence_hashes(self) -> list[int]:
        """Of all blocks."""
        return [row.sequence_hash for row in self._rows.values()]

    def drain_events(self) -> list[BlockEvent]:
        """Changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def slot_of(self, name: bytes) -> int | None:
        return self._slots.get(name)

    def use(self, names: Iterable[bytes]) -> None:
        """A prompt asks for these blocks, which are here: the first ones of a chain."""
        for name in names:
            slot = self._slots[name]
            row = self._rows[slot]
            row.num_uses += 1
            row.value = self._age + 1 + row.num_uses
            self._push(slot, row)

    def begin(self, name: bytes, parent: bytes, sequence_hash: int, position: int) -> tuple[int, StoredBlock] | None:
        """The slot to write a block to, and its header. Call `end` after the write.

        None if the block is here, if its parent is not, or if every block here is worth more.
        """
        behind = self._row_of(parent)
        if name in self._slots or name in self._begun or (behind is None and position):
            return None
        row = _Row(name, sequence_hash, position, self._value_behind(behind))
        slot = self._free.pop() if self._free else self._evict_below(row)
        if slot is None:
            return None
        row.value = self._value_behind(behind)  # the age may have changed
        self._begun[name] = slot, row
        number, self._next_number = self._next_number, self._next_number + 1
        return slot, StoredBlock(name, parent, sequence_hash, position, row.value, number)

    def end(self, name: bytes, *, is_written: bool) -> None:
        slot, row = self._begun.pop(name)
        if is_written:
            self._enter(slot, row)
        else:
            self._free.append(slot)

    def forget(self, name: bytes) -> int | None:
        """The block cannot be read, or is wrong: its slot is free. Blocks behind it are out of reach, and go later."""
        slot = self._slots.get(name)
        if slot is not None:
            self._drop(slot)
            self._free.append(slot)
        return slot

    def _value_behind(self, parent: _Row | None) -> int:
        """Of a new block."""
        return self._age + 1 if parent is None else min(self._age + 1, parent.value)

    def _row_of(self, name: bytes) -> _Row | None:
        if name in self._begun:
            return self._begun[name][1]
        slot = self._slots.get(name)
        return None if slot is None else self._rows[slot]

    def _evict_below(self, new: _Row) -> int | None:
        """Free the least valuable slot, unless it is worth as much as `new`. So no ancestor of `new` goes."""
        while self._heap:
            worth, slot = self._heap[0]
            row = self._rows.get(slot)
            if row is not None and row.worth == worth:
                if worth >= new.worth:
                    return None
                heapq.heappop(self._heap)
                self._age = max(self._age, row.value)
                self._drop(slot)
                return slot
            heapq.heappop(self._heap)
        return None

    def _enter(self, slot: int, row: _Row) -> None:
        self._rows[slot], self._slots[row.name] = row, slot
        self._events.append(BlockStored(row.sequence_hash))
        self._push(slot, row)

    def _push(self, slot: int, row: _Row) -> None:
        heapq.heappush(self._heap, (row.worth, slot))
        if len(self._heap) > 4 * self.num_slots:  # mostly entries that are out of date
            self._heap = [(row.worth, slot) for slot, row in self._rows.items()]
            heapq.heapify(self._heap)

    def _drop(self, slot: int) -> None:
        row = self._rows.pop(slot)
        del self._slots[row.name]
        self._events.append(BlockRemoved(row.sequence_hash))

    def check(self) -> None:
        """Each slot is free, being written, or has one block; the heap knows every block."""
        begun = [slot for slot, _ in self._begun.values()]
        assert sorted([*self._rows, *self._free, *begun]) == list(range(self.num_slots))
        assert self._slots == {row.name: slot for slot, row in self._rows.items()}
        assert not self._begun.keys() & self._slots.keys()
        assert {(row.worth, slot) for slot, row in self._rows.items()} <= set(self._heap)
