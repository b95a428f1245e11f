"""Which block lies in which slot of a disk tier, and which block gives up its slot for a new one.

A block is written only behind its parent, so the blocks on disk begin at the first block of their prompt. The least
valuable block gives up its slot (GreedyDual):

    value = age of the table when the block was written or last asked for + 1 + number of times it was asked for
    age   = the highest value that a block had when it gave up its slot, or kept it from a new block

So uses count, and old uses count ever less. Every block of a worker has the same bytes, and about the same cost to
compute again; a block also carries the cost of all blocks behind it, which nothing reaches without it. Therefore no
block is worth more than its parent, and of equal blocks the last one of a chain goes first. A new block that is worth
no more than any other raises the age, and is not written if its parent keeps it below the new age.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored
from worker.tier.slot_file import StoredBlock

MAX_SLOTS = 1_000_000  # of a worker, of about 1 KB of memory each; beyond: the config is refused
MAX_POPS = 64  # values that are brought up to date for one new block; beyond: it is not written
MAX_FORGOTTEN = 1024  # blocks whose uses are kept until they are written again; beyond: those of the oldest are lost


@dataclass(slots=True, eq=False)
class _Row:
    name: bytes
    parent: bytes
    sequence_hash: int
    position: int
    value: int
    slot: int
    num_uses: int = 0
    is_corrupt: bool = False  # known while it is written

    @property
    def worth(self) -> tuple[int, int]:
        return self.value, -self.position


class SlotTable:
    """Pure; one owner. Slots are 0 .. num_slots - 1."""

    def __init__(self, num_slots: int, stored: Mapping[int, StoredBlock]) -> None:
        """`stored`: from the scan of the file. A block without its parent in the place before it is dropped.

        The file does not have the uses, so each stored block counts as used once, beside new ones.
        """
        assert num_slots <= MAX_SLOTS
        self.num_slots = num_slots
        self._rows: dict[bytes, _Row] = {}  # by name
        self._with_hash: dict[int, tuple[_Row, ...]] = {}  # the same: a hash can be forged, so several may have one
        self._begun: dict[bytes, _Row] = {}  # that are being written, by name
        self._forgotten: dict[bytes, _Row] = {}  # by name
        self._erasing: set[int] = set()  # slots with a corrupt block
        self._failed: list[int] = []  # slots that could not be written
        self.grows = True  # False: the disk is full, so a new block takes the slot of another
        # One entry for each row: its worth when it was entered, which is at most that of now, a number, the row.
        self._heap: list[tuple[tuple[int, int], int, _Row]] = []
        self._num_entered = 0
        self._events: list[BlockEvent] = []
        self._age = max((block.value for block in stored.values()), default=0)
        self._next_number = 1 + max((block.number for block in stored.values()), default=0)
        for slot, block in sorted(stored.items(), key=lambda item: item[1].position):
            behind = self._rows.get(block.parent)
            if not block.position or (behind is not None and behind.position + 1 == block.position):
                self._add(_Row(block.name, block.parent, block.sequence_hash, block.position, self._age + 2, slot, 1))
        used = {row.slot for row in self._rows.values()}
        self._num_touched = max(used, default=-1) + 1  # the slots from here on are free
        self._free = [slot for slot in range(self._num_touched) if slot not in used]  # of those before

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._rows)

    def sequence_hashes(self) -> list[int]:
        """Of all blocks."""
        return list(self._with_hash)

    def drain_events(self) -> list[BlockEvent]:
        """Changes since the last call, or since the scan, in order."""
        events, self._events = self._events, []
        return events

    def slot_of(self, name: bytes) -> int | None:
        row = self._rows.get(name)
        return None if row is None else row.slot

    def use(self, names: Iterable[bytes]) -> None:
        """A prompt asks for these blocks, which are here: the first ones of a chain."""
        parent: _Row | None = None
        for name in names:
            row = self._rows[name]
            row.num_uses += 1
            row.value = self._value_behind(parent, row.num_uses)
            parent = row

    def begin(self, name: bytes, parent: bytes, sequence_hash: int, position: int) -> tuple[int, StoredBlock] | None:
        """The slot to write a block to, and its header. Call `end` after the write.

        None if the block is here, if its parent is not, or if no block here is worth less.
        """
        behind = self._row_of(parent)
        if name in self._rows or name in self._begun or (behind is None and position):
            return None
        known = self._forgotten.get(name)  # blocks behind it may still have the value of its uses
        row = known or _Row(name, parent, sequence_hash, position, 0, 0)
        row.value = self._value_behind(behind, row.num_uses)
        slot = self._free_slot(row, behind)
        if slot is None:
            return None
        row.slot = slot
        row.value = self._value_behind(behind, row.num_uses)  # the age may have changed
        self._begun[name] = row
        number, self._next_number = self._next_number, self._next_number + 1
        return slot, StoredBlock(name, parent, sequence_hash, position, row.value, number)

    def end(self, name: bytes, *, is_written: bool) -> list[int]:
        """A write has ended. A block whose parent has gone meanwhile is dropped. Returns slots to erase."""
        row = self._begun.pop(name)
        if row.is_corrupt:
            row.is_corrupt = False  # of the next write
            self._erasing.add(row.slot)
            return [row.slot]
        if not is_written:
            self._failed.append(row.slot)
        elif not row.position or row.parent in self._rows:
            self._forgotten.pop(name, None)
            if row.sequence_hash not in self._with_hash:
                self._events.append(BlockStored(row.sequence_hash))
            self._add(row)
        else:
            self._free.append(row.slot)
        return []

    def forget(self, name: bytes) -> None:
        """The block cannot be read. Blocks behind it are out of reach until it is written again."""
        if (row := self._rows.get(name)) is not None:
            self._forget(row)
            self._free.append(row.slot)

    def forget_corrupt(self, sequence_hashes: Collection[int]) -> list[int]:
        """Forget these blocks. Returns their slots, to be erased: a slot is free after `on_erased`."""
        for row in self._begun.values():
            row.is_corrupt |= row.sequence_hash in sequence_hashes
        found = [row for each in sequence_hashes for row in self._with_hash.get(each, ())]
        for row in found:
            self._forget(row)
            self._erasing.add(row.slot)
        return [row.slot for row in found]

    def _forget(self, row: _Row) -> None:
        self._drop(row)
        self._forgotten[row.name] = row
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    @property
    def erases(self) -> bool:
        return bool(self._erasing)

    def on_erased(self, slot: int) -> None:
        self._erasing.discard(slot)
        self._free.append(slot)

    def _value_behind(self, parent: _Row | None, num_uses: int) -> int:
        value = self._age + 1 + num_uses
        return value if parent is None else min(value, parent.value)

    def _row_of(self, name: bytes) -> _Row | None:
        return self._begun.get(name) or self._rows.get(name)

    def _free_slot(self, new: _Row, parent: _Row | None) -> int | None:
        if self._free:
            return self._free.pop()
        if self._failed and self.grows:
            return self._failed.pop()
        if self._num_touched < self.num_slots and self.grows:
            self._num_touched += 1
            return self._num_touched - 1
        least = self._least()
        if least is None:
            return None
        if least.worth >= new.worth:
            self._age = max(self._age, least.value)
            new.value = self._value_behind(parent, new.num_uses)
        if least.worth >= new.worth:  # as every ancestor of `new` is
            return None
        heapq.heappop(self._heap)
        self._age = max(self._age, least.value)
        self._drop(least)
        return least.slot

    def _least(self) -> _Row | None:
        """The least valuable block, on top of the heap. None if it is not known after MAX_POPS."""
        for _ in range(MAX_POPS):
            if not self._heap:
                return None
            worth, number, row = self._heap[0]
            if self._rows.get(row.name) is not row:
                heapq.heappop(self._heap)
            elif worth == row.worth:
                return row
            else:
                heapq.heapreplace(self._heap, (row.worth, number, row))
        return None

    def _push(self, row: _Row) -> None:
        self._num_entered += 1
        heapq.heappush(self._heap, (row.worth, self._num_entered, row))
        if len(self._heap) > 2 * self.num_slots:  # half of them are of forgotten blocks
            rows = enumerate(self._rows.values(), start=-self.num_slots)  # numbers below those of later entries
            self._heap = [(row.worth, number, row) for number, row in rows]
            heapq.heapify(self._heap)

    def _add(self, row: _Row) -> None:
        self._rows[row.name] = row
        self._with_hash[row.sequence_hash] = (*self._with_hash.get(row.sequence_hash, ()), row)
        self._push(row)

    def _drop(self, row: _Row) -> None:
        del self._rows[row.name]
        others = tuple(other for other in self._with_hash.pop(row.sequence_hash) if other is not row)
        if others:
            self._with_hash[row.sequence_hash] = others
        else:
            self._events.append(BlockRemoved(row.sequence_hash))

    def check(self) -> None:
        """Each slot is free, failed, written or erased, or has one block. No block is worth more than its parent."""
        used = [row.slot for row in (*self._rows.values(), *self._begun.values())]
        slots = sorted([*used, *self._free, *self._failed, *self._erasing])
        assert slots == list(range(self._num_touched))
        assert self._num_touched <= self.num_slots
        assert not self._begun.keys() & self._rows.keys()
        with_hash = [(row.name, each) for each, rows in self._with_hash.items() for row in rows]
        assert sorted(with_hash) == sorted((name, row.sequence_hash) for name, row in self._rows.items())
        entered = {id(row): worth for worth, _, row in self._heap}
        for row in self._rows.values():
            assert entered[id(row)] <= row.worth
            parent = self._rows.get(row.parent) if row.position else None
            assert parent is None or parent.worth > row.worth
