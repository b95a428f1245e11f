"""Who holds which KV blocks, and for how long.

A `Claim` is one holder with all its blocks. Blocks are shared: two sequences may hold one prefix, and a block may be
held and leased at once. So that the holders add up to the pool's ledger, `count_once` counts each block at one holder:
of those whose kind belongs to the block's column, the one that came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from core.block_pool import BlockPool, Column
from core.handoff import OwnerState, PullerState


class SequenceState(Enum):
    WAITING = "waiting"  # for a step
    RUNNING = "running"
    TRANSFER = "transfer"  # its KV is being pulled, or waits for blocks to pull into
    ENDING = "ending"  # it has ended; a step, a read or a check still uses its blocks


# The live states of a holder say what it is, and so which column its blocks make it answer for.
HolderState = SequenceState | OwnerState | PullerState


@dataclass(frozen=True, slots=True)
class Claim:
    name: str  # request id of a sequence; short name of a transfer
    state: HolderState
    blocks: Sequence[int]
    since: float  # when it came to this worker
    peer: str = ""  # agent at the other end of a transfer

    @property
    def column(self) -> Column:
        if isinstance(self.state, SequenceState):
            return Column.HELD
        return Column.LEASED if isinstance(self.state, OwnerState) else Column.INCOMING


@dataclass(frozen=True, slots=True)
class BlockHolder:
    claim: Claim
    num_counted: int  # blocks of the ledger that are counted at this holder
    age_s: float


def count_once(claims: Iterable[Claim], pool: BlockPool, now: float) -> list[BlockHolder]:
    """The holders, oldest first. Their counts sum to HELD, LEASED and INCOMING of `pool.ledger()`, column by column."""
    counted: set[int] = set()
    holders = []
    for claim in sorted(claims, key=lambda claim: claim.since):
        mine = {block for block in claim.blocks if pool.column_of(block) is claim.column} - counted
        counted |= mine
        holders.append(BlockHolder(claim, len(mine), now - claim.since))
    return holders


def check_claims(claims: Iterable[Claim], pool: BlockPool) -> None:
    """Nobody claims a block that the pool does not know as claimed, and no claimed block is without its holder."""
    sums = dict.fromkeys((Column.HELD, Column.LEASED, Column.INCOMING), 0)
    for holder in count_once(claims, pool, 0.0):
        sums[holder.claim.column] += holder.num_counted
    ledger = pool.ledger()
    assert all(ledger[column] == count for column, count in sums.items()), f"{sums} claimed, {ledger} in the ledger"
