"""The threads of the disk tier with a file that the test controls."""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

import pytest

from core.kv_layout import KVLayout
from kv_transfer.transports.transport import PoolMemory
from worker.tier.events import (
    BlockRead,
    BlocksCopied,
    BlocksRead,
    BlocksWritten,
    BlockWrite,
    EraseSlot,
    GiveUpRead,
    ReadBlocks,
    ReadEnd,
    SlotErased,
    TierEvent,
    WriteBlocks,
)
from worker.tier.slot_file import SlotFile, StoredBlock
from worker.tier.threads import TierThreads

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)
NAME = b"n" * 32
WRITE = WriteBlocks((BlockWrite(0, 0, StoredBlock(NAME, NAME, 7, 0, 1, 1)),))
READ = ReadBlocks(-1, (BlockRead(0, NAME, 1),), 60.0)
WAIT_S = 30.0  # beyond: the test fails


class ControlledFile:
    """Every operation waits for `answers`, then raises `error` if there is one. A read brings ones."""

    def __init__(self) -> None:
        self.answers, self.begun = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.erased: list[int] = []

    def _wait(self) -> None:
        self.begun.set()
        assert self.answers.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def write(self, *_: object) -> None:
        self._wait()

    def read(self, _slot: int, _name: bytes, target: memoryview) -> bool:
        self._wait()
        target[:] = b"\1" * target.nbytes
        return True

    def erase(self, slot: int) -> None:
        self._wait()
        self.erased.append(slot)

    def close(self) -> None:
        """Nothing to close."""


class Driven:
    def __init__(self) -> None:
        self.file, self.events = ControlledFile(), queue.SimpleQueue[TierEvent]()
        self.memory = PoolMemory(0, 2, LAYOUT, memoryview(bytearray(2 * LAYOUT.block_bytes)))
        self.threads = TierThreads(cast(SlotFile, self.file), self.memory, self.events.put)

    def next(self) -> Any:
        return self.events.get(timeout=WAIT_S)


def test_a_read_that_was_given_up_writes_into_no_target() -> None:
    driven = Driven()
    driven.threads.perform(READ)
    assert driven.file.begun.wait(WAIT_S)
    driven.threads.perform(GiveUpRead(-1))
    driven.file.answers.set()
    event = driven.next()
    assert (event.read_id, event.num_read, event.end) == (-1, 0, ReadEnd.LATE)
    assert not any(driven.memory.block(1))
    driven.threads.perform(READ)
    assert driven.next().end is ReadEnd.COMPLETE
    assert set(driven.memory.block(1)) == {1}
    assert driven.threads.close(WAIT_S)


def test_the_end_of_a_worker_drops_writes_and_runs_erasures() -> None:
    driven = Driven()
    driven.threads.perform(WRITE)
    assert driven.file.begun.wait(WAIT_S)
    driven.threads.perform(WRITE)
    driven.threads.perform(EraseSlot(5))
    assert not driven.threads.close(0.0), "the disk hangs"
    driven.file.answers.set()
    assert driven.threads.close(WAIT_S)
    assert driven.file.erased == [5]
    assert [driven.next() for _ in range(3)] == [BlocksCopied(), BlocksWritten(1), SlotErased(5, True)]


@pytest.mark.parametrize("error", [OSError("broken"), ValueError("a defect")])
def test_any_error_is_a_failure_that_the_threads_survive(error: Exception) -> None:
    driven = Driven()
    driven.file.error = error
    driven.file.answers.set()
    for _ in range(2):
        driven.threads.perform(WRITE)
        assert [driven.next(), driven.next()] == [BlocksCopied(), BlocksWritten(0)]
        driven.threads.perform(EraseSlot(5))
        assert driven.next() == SlotErased(5, False)
        driven.threads.perform(READ)
        event = driven.next()
        assert isinstance(event, BlocksRead)
        assert (event.num_read, event.end) == (0, ReadEnd.FAILED)
    assert driven.threads.close(WAIT_S)
