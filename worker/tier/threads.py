"""The shell of a `DiskTier`: one thread that writes, and one that reads.

Writes first copy their blocks into buffers of the writing thread, and reads arrive in a buffer of the reading thread.
So no block is held for the time of a disk. A hung disk holds up its thread alone; the machine gives the read up, and
the process ends without waiting for the thread. The bytes of a block are copied into its target under a lock, and only
while the read is open, so `perform(GiveUpRead)` waits for the copy of one block at most.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import assert_never

from core.handoff import TransferId
from kv_transfer.transports.transport import PoolMemory
from worker.tier.disk_tier import MAX_WRITES
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
from worker.tier.slot_file import SlotFile

TOUCH_S = 300.0  # at most from a use of a file that is open to the time that it has; see `OpenFile.remove_unused`
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NICENESS = 5  # of writes, for which no prompt waits

logger = logging.getLogger(__name__)


class TierThreads:
    def __init__(
        self,
        file: SlotFile,
        pool: PoolMemory,
        post: Callable[[TierEvent], None],
        clock: Callable[[], float] = time.monotonic,
        in_memory: bool = False,
    ) -> None:
        """`post` is called on the threads, and must not block. `in_memory`: the file ends with a regular end."""
        self._file, self._pool, self._post, self._clock, self._in_memory = file, pool, post, clock, in_memory
        block_bytes = pool.layout.block_bytes
        self._buffers = pool.host_buffer(MAX_WRITES * block_bytes).reshape(MAX_WRITES, block_bytes)
        self._arrived = pool.host_buffer(block_bytes)  # of the block that is read
        self._open_reads: set[TransferId] = set()  # which may write into their targets
        self._copying = threading.Lock()  # guards these, and the targets
        self._closing = False
        self._to_write: queue.SimpleQueue[WriteBlocks | EraseSlot | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[ReadBlocks, float] | None] = queue.SimpleQueue()  # with its time limit
        self._threads = [
            threading.Thread(target=loop, name=f"tandem-disk-{loop.__name__.strip('_')}", daemon=True)
            for loop in (self._write_all, self._read_all)
        ]
        for thread in self._threads:
            thread.start()

    def perform(self, action: TierAction) -> None:
        """Queue an action. The machine bounds both queues: one write in flight, and MAX_PREFIX_PULLS reads."""
        match action:
            case WriteBlocks() | EraseSlot():
                self._to_write.put(action)
            case ReadBlocks(read_id=read_id, limit_s=limit_s):
                with self._copying:
                    self._open_reads.add(read_id)
                self._to_read.put((action, self._clock() + limit_s))
            case GiveUpRead(read_id):
                with self._copying:
                    self._open_reads.discard(read_id)
            case _:
                assert_never(action)

    def close(self, timeout_s: float, starts_again: bool = False) -> bool:
        """Drop what is queued, except erasures, and wait for the threads. False if one has not ended in `timeout_s`.

        `starts_again`: another process of this worker follows, and finds the blocks also in host memory.
        """
        self._closing = True
        self._to_write.put(None)
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._in_memory and not starts_again:
            self._file.remove()
        self._file.close()
        return True

    def _write_all(self) -> None:
        if sys.platform == "linux":  # where niceness belongs to a thread
            os.nice(NICENESS)
        while (action := self._next_to_write()) is not None:
            if isinstance(action, EraseSlot):
                self._erase(action.slot)
            elif not self._closing:
                self._write(action)

    def _next_to_write(self) -> WriteBlocks | EraseSlot | None:
        """Reads and idle hours do not change the time of a file: without a touch, it would count as unused."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._to_write.get(timeout=TOUCH_S)
            with contextlib.suppress(OSError):
                self._file.touch()

    def _erase(self, slot: int) -> None:
        try:
            self._file.erase(slot)
        except Exception as error:  # noqa: BLE001  the worker lives on with a file that no other process finds
            logger.warning("the file of the tier is removed: slot %d keeps a corrupt block: %s", slot, error)
            self._file.remove()
        self._post(SlotErased(slot))

    def _write(self, action: WriteBlocks) -> None:
        num_written, is_full = 0, False
        try:
            try:
                for buffer, write in zip(self._buffers, action.writes, strict=False):
                    self._pool.copy_out(write.block, buffer)
            finally:
                self._post(BlocksCopied())
            for buffer, write in zip(self._buffers, action.writes, strict=False):
                self._file.write(write.slot, write.header, buffer.data)
                num_written += 1
        except Exception as error:  # noqa: BLE001  the thread lives on, and the machine counts a failure
            is_full = isinstance(error, OSError) and error.errno in FULL
            logger.warning("the disk tier pauses %s: %r", "its growth or writes" if is_full else "its writes", error)
        self._post(BlocksWritten(num_written, is_full))

    def _read_all(self) -> None:
        while (queued := self._to_read.get()) is not None and not self._closing:
            self._read(*queued)

    def _read(self, action: ReadBlocks, ends_at: float) -> None:
        began_at = self._clock()
        end, num_read = ReadEnd.COMPLETE, 0
        try:
            for read in action.reads:
                if self._closing or self._clock() >= ends_at:
                    end = ReadEnd.LATE
                    logger.warning(
                        "the disk tier pauses its reads: %d of %d blocks in time", num_read, len(action.reads)
                    )
                    break
                if not self._file.read(read.slot, read.name, self._arrived.data):
                    end = ReadEnd.LOST
                    break
                if not self._copy(action.read_id, read.target):
                    end = ReadEnd.LATE
                    break
                num_read += 1
        except Exception as error:  # noqa: BLE001  the thread lives on, and the machine counts a failure
            end = ReadEnd.FAILED
            logger.warning("the disk tier pauses its reads: %r", error)
        with self._copying:
            self._open_reads.discard(action.read_id)
        self._post(BlocksRead(action.read_id, num_read, self._clock() - began_at, end))

    def _copy(self, read_id: TransferId, target: int) -> bool:
        """Copy what has arrived into its target. False: the read has been given up, and the target is another's."""
        with self._copying:
            if read_id not in self._open_reads:
                return False
            self._pool.copy_in(target, self._arrived)
            return True
