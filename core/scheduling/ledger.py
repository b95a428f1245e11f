"""The holders of KV blocks: sequences and transfers.

A `Claim` is one holder with all its blocks. Holders share blocks: two sequences may hold one prefix, and a block may be
held and leased at once. `count_once` counts each block for one holder only, so that the counts add up to the ledger of
the pool. Each block counts for its oldest holder of the kind that belongs to the column of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from core.handoff import OwnerState, PullerState
from core.scheduling.block_pool import BlockPool, Column


class SequenceState(Enum):
    WAITING = "waiting"  # for a step
    RUNNING = "running"
    TRANSFER = "transfer"  # pulls its KV, or waits for target blocks
    ENDING = "ending"  # has ended, but a step or a read still uses its blocks


# The type of the state tells sequences, offers and pulls apart, and so the column that their blocks count in.
HolderState = SequenceState | OwnerState | PullerState


@dataclass(frozen=True, slots=True)
class Claim:
    name: str  # request id of a sequence; short name of a transfer
    state: HolderState
    blocks: Sequence[int]
    since: float  # time of arrival at this worker
    peer: str = ""  # the other agent of a transfer

    @property
    def column(self) -> Column:
        if isinstance(self.state, SequenceState):
            return Column.HELD
        return Column.LEASED if isinstance(self.state, OwnerState) else Column.INCOMING


@dataclass(frozen=True, slots=True)
class BlockHolder:
    claim: Claim
    num_counted: int  # blocks of the ledger that count for this holder
    age_s: float


class Columns(Protocol):
    """A pool of blocks."""

    def column_of(self, block: int) -> Column: ...


def count_once(claims: Iterable[Claim], pool: Columns, now: float) -> list[BlockHolder]:
    """The holders, oldest first. For HELD, LEASED and INCOMING, their counts add up to `pool.ledger()`."""
    counted: set[int] = set()
    holders = []
    for claim in sorted(claims, key=lambda claim: claim.since):
        column = claim.column
        mine = {block for block in claim.blocks if pool.column_of(block) is column} - counted
        counted |= mine
        holders.append(BlockHolder(claim, len(mine), now - claim.since))
    return holders


def check_claims(claims: Iterable[Claim], pool: BlockPool) -> None:
    """The claims and the pool's ledger agree in every column."""
    sums = dict.fromkeys((Column.HELD, Column.LEASED, Column.INCOMING), 0)
    for holder in count_once(claims, pool, 0.0):
        sums[holder.claim.column] += holder.num_counted
    ledger = pool.ledger()
    assert all(ledger[column] == count for column, count in sums.items()), f"{sums} claimed, {ledger} in the ledger"
