"""The disk of a simulated worker. It keeps the promises of worker/tier/events.py in virtual time.

The slots outlive the worker, as a file outlives its process. A write that the death of its worker cuts off leaves a
torn slot. The blocks of a write are copied at the end of the time of their copy, and a read fills one half of each
block before the other, so a block that is reused meanwhile shows in a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from core.handoff import TransferId
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.memory import Memory
from simulator.virtual.world import SimulationError, World
from worker.tier.events import (
    BlocksCopied,
    BlocksRead,
    BlocksWritten,
    EraseSlot,
    GiveUpRead,
    ReadBlocks,
    ReadEnd,
    SlotErased,
    TierAction,
    TierEvent,
    WriteBlocks,
)
from worker.tier.slot_file import StoredBlock

Slots = dict[int, tuple[StoredBlock, list[int]]]  # header and content of the whole slots, by slot
COPY_S = 0.001  # of a write
HANG_S = 1.5  # of a read that hangs


class SimulatedDisk:
    def __init__(
        self, world: World, slots: Slots, memory: Memory, spec: WorkerSpec, post: Callable[[TierEvent], None]
    ) -> None:
        self.alive = True
        self.is_full = False  # failed writes say so
        self._world, self._slots, self._memory, self._faults, self._post = world, slots, memory, spec.disk, post
        self._read_until = 0.0  # one read at a time
        self._open_reads: set[TransferId] = set()  # which may write into their targets

    def perform(self, action: TierAction) -> None:
        match action:
            case WriteBlocks():
                self._world.after(COPY_S, partial(self._copy, action))
            case EraseSlot(slot):
                self._slots.pop(slot, None)
                self._world.after(0.0, partial(self._post, SlotErased(slot)))
            case ReadBlocks():
                self._open_reads.add(action.read_id)
                self._read(action)
            case GiveUpRead(read_id):
                self._open_reads.discard(read_id)
            case _:
                raise SimulationError(f"no code performs {action}")

    def _copy(self, action: WriteBlocks) -> None:
        if not self.alive:
            return
        contents = [self._memory.read(write.block) for write in action.writes]
        self._post(BlocksCopied())
        num_written = len(action.writes)
        if self._world.chance(self._faults.failed):
            self._world.counts["disk failed"] += 1
            num_written = self._world.random.randrange(num_written)
        for write in action.writes:  # torn until the write ends
            self._slots.pop(write.slot, None)
        seconds = self._faults.seconds_per_block * len(action.writes)
        self._world.after(seconds, partial(self._end_write, action, contents[:num_written]))

    def _end_write(self, action: WriteBlocks, contents: list[list[int]]) -> None:
        if not self.alive:
            self._world.counts["torn write"] += 1
            return
        for write, content in zip(action.writes, contents, strict=False):
            if self._world.chance(self._faults.damaged):
                self._world.counts["damaged slot"] += 1  # its digest does not match, so no read finds it
                continue
            self._slots[write.slot] = write.header, content
        self._world.counts["written block"] += len(contents)
        self._post(BlocksWritten(len(contents), self.is_full))

    def _read(self, action: ReadBlocks) -> None:
        seconds = self._faults.seconds_per_block * len(action.reads)
        begins_at = max(self._world.now, self._read_until)
        ends_at = begins_at + seconds
        late_at = self._world.now + action.limit_s
        end, num_read = ReadEnd.COMPLETE, len(action.reads)
        if ends_at > late_at:
            end, ends_at = ReadEnd.LATE, max(begins_at, late_at)
            num_read = int((ends_at - begins_at) / self._faults.seconds_per_block)
        if self._world.chance(self._faults.failed):
            end, num_read = ReadEnd.FAILED, self._world.random.randrange(num_read + 1)
        if self._world.chance(self._faults.hung):
            ends_at += HANG_S
        self._read_until = ends_at
        self._world.at((begins_at + ends_at) / 2, partial(self._fill, action, num_read, slice(None, None, 2)))
        self._world.at(ends_at, partial(self._end_read, action, num_read, end, begins_at))

    def _found(self, action: ReadBlocks, num_read: int) -> list[list[int] | None]:
        """The content of each block; None where the slot has another one."""
        found = [self._slots.get(read.slot) for read in action.reads[:num_read]]
        named = zip(found, action.reads, strict=False)
        return [None if kept is None or kept[0].name != read.name else kept[1] for kept, read in named]

    def _fill(self, action: ReadBlocks, num_read: int, slots: slice) -> None:
        if self.alive and action.read_id in self._open_reads:
            for read, content in zip(action.reads, self._found(action, num_read), strict=False):
                if content is not None:
                    self._memory.write(read.target, content[slots], slots)

    def _end_read(self, action: ReadBlocks, num_read: int, end: ReadEnd, begun_at: float) -> None:
        if not self.alive:
            return
        found = self._found(action, num_read)
        self._fill(action, num_read, slice(1, None, 2))
        self._open_reads.discard(action.read_id)
        if None in found:
            end, num_read = ReadEnd.LOST, found.index(None)
        self._world.counts[f"disk read {end.value}"] += 1
        self._world.counts["block from disk"] += num_read
        self._post(BlocksRead(action.read_id, num_read, self._world.now - begun_at, end))
