"""One offer: which blocks are leased for it, what its puller wants, and what has been announced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.handoff import OWNER_STEPS, AbortReason, AgentAddress, OfferedBlocks, OwnerState, TransferId
from kv_transfer.plan import TransferPlan


@dataclass(slots=True, eq=False)
class Offer:
    transfer_id: TransferId
    peer: AgentAddress
    plan: TransferPlan
    created_at: float
    heard_at: float  # last sign of life of the puller; the lease runs from here
    state: OwnerState = OwnerState.COMPUTING
    leased: dict[int, int] = field(default_factory=dict)  # position -> block
    wanted_pieces: frozenset[int] = frozenset()
    wanted: frozenset[int] | None = None  # positions; None until the WANT has come
    # what is announced, wanted and readable, in this order
    announced_pieces: list[int] = field(default_factory=list)
    announced_blocks: list[int] = field(default_factory=list)  # one for each piece
    last: bool = False  # nothing more will be offered
    first_token_id: int | None = None
    newest: int = 0  # counter of the newest WANT, RELEASE or ABORT
    renewed_by: int = 0  # counter of the newest message that renewed the lease
    ready_sent_at: float = 0.0
    aborting: AbortReason | None = None
    detail: str = ""

    @property
    def parts(self) -> int:
        """Pieces in each of our blocks; a WANT and a READY count pieces."""
        return self.plan.source_parts

    @property
    def moves_whole_blocks(self) -> bool:
        return self.plan.moves_whole_blocks

    @property
    def may_be_read(self) -> bool:
        return bool(self.announced_pieces)

    @property
    def num_announced(self) -> int:
        return len(self.announced_pieces)

    def want(self, pieces: Sequence[int]) -> frozenset[int]:
        """The puller has said which pieces it lacks. Returns the positions they are of."""
        self.wanted_pieces = wanted = frozenset(pieces)
        self.wanted = wanted if self.parts == 1 else frozenset(piece // self.parts for piece in pieces)
        return self.wanted

    def announce(self, blocks: Mapping[int, int]) -> None:
        """What the puller wants of blocks by position, in order of position."""
        positions = sorted(blocks)
        if self.parts == 1:  # each wanted position is a piece
            self.announced_pieces += positions
            self.announced_blocks += [blocks[position] for position in positions]
            return
        for position in positions:
            pieces = range(position * self.parts, (position + 1) * self.parts)
            wanted = [piece for piece in pieces if piece in self.wanted_pieces]
            self.announced_pieces += wanted
            self.announced_blocks += [blocks[position]] * len(wanted)

    def announced(self, first: int, end: int) -> OfferedBlocks:
        """Rows [first, end) of what is announced. The agent fills in the digests."""
        pieces = tuple(self.announced_pieces[first:end])
        return OfferedBlocks(pieces, tuple(self.announced_blocks[first:end]), (0,) * len(pieces))

    def renew(self, counter: int, now: float) -> None:
        self.heard_at = now
        self.renewed_by = max(self.renewed_by, counter)

    def step(self, state: OwnerState) -> None:
        assert state in OWNER_STEPS[self.state], f"{self.state.name} -> {state.name} is not a step of an owner"
        self.state = state
