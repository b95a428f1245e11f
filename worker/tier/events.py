"""The events and actions of a `DiskTier`.

The threads of the tier, and the virtual disk of the simulator, guarantee:
  - `WriteBlocks`: exactly one `BlocksCopied`, then exactly one `BlocksWritten`; no byte of the pool is read in between;
  - `ReadBlocks`: exactly one `BlocksRead`. Nothing writes into the targets after this, or after a `GiveUpRead`, however
    long the disk hangs. A block counts as read if its slot has its name and its digest is right;
  - `EraseSlot`: exactly one `SlotErased`, also before a regular end of the worker;
  - writes and erasures happen in the order of their actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from core.handoff import TransferId
from worker.tier.slot_file import StoredBlock


class ReadEnd(Enum):
    COMPLETE = "complete"
    LATE = "late"  # the limit of time has passed
    LOST = "lost"  # the next slot does not have its block
    FAILED = "failed"  # the disk has returned an error


# ---- actions


@dataclass(frozen=True, slots=True)
class BlockWrite:
    block: int  # held until `BlocksCopied`
    slot: int
    header: StoredBlock


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    writes: tuple[BlockWrite, ...]


@dataclass(frozen=True, slots=True)
class EraseSlot:
    """The block in the slot is wrong, and must not be found by a scan."""

    slot: int


@dataclass(frozen=True, slots=True)
class BlockRead:
    slot: int
    name: bytes
    target: int  # an INCOMING block


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    read_id: TransferId
    reads: tuple[BlockRead, ...]  # in order of position
    limit_s: float


@dataclass(frozen=True, slots=True)
class GiveUpRead:
    """The targets of this read belong to others from now on. The shell performs it before the steps of its event."""

    read_id: TransferId


TierAction = WriteBlocks | EraseSlot | ReadBlocks | GiveUpRead

# ---- events


@dataclass(frozen=True, slots=True)
class BlocksCopied:
    """The blocks of the write in flight are in a buffer of the tier."""


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    num_written: int  # the first ones; fewer than asked for after an error
    is_full: bool = False  # the error: the disk has no room for a further slot


@dataclass(frozen=True, slots=True)
class BlocksRead:
    read_id: TransferId
    num_read: int  # the first ones
    seconds: float  # that these took
    end: ReadEnd


@dataclass(frozen=True, slots=True)
class SlotErased:
    """No later process finds the block: the slot is erased, or else the file has lost its name."""

    slot: int


TierEvent = BlocksCopied | BlocksWritten | BlocksRead | SlotErased
