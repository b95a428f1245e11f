"""One offer: which blocks are leased for it, what its puller wants, and what has been announced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.handoff import OWNER_STEPS, AbortReason, AgentAddress, OfferedBlock, OwnerState, TransferId


@dataclass(slots=True, eq=False)
class Offer:
    transfer_id: TransferId
    peer: AgentAddress
    created_at: float
    heard_at: float  # last sign of life of the puller; the lease runs from here
    state: OwnerState = OwnerState.COMPUTING
    leased: dict[int, int] = field(default_factory=dict)  # position -> block
    computed: dict[int, int] = field(default_factory=dict)  # block -> content: all of its sequence, wanted or not
    parts: int = 1  # pieces that each of our blocks has for the puller; a WANT and a READY count those
    wanted_pieces: frozenset[int] = frozenset()
    wanted: frozenset[int] | None = None  # positions; None until the WANT has come
    announced: list[OfferedBlock] = field(default_factory=list)  # wanted and readable, in order of announcement
    last: bool = False  # nothing more will be offered
    first_token_id: int | None = None
    newest: int = 0  # counter of the newest WANT, RELEASE or ABORT
    renewed_by: int = 0  # counter of the newest message that renewed the lease
    ready_sent_at: float = 0.0
    aborting: AbortReason | None = None
    detail: str = ""

    @property
    def may_be_read(self) -> bool:
        return bool(self.announced)

    def pieces_of(self, blocks: Mapping[int, int]) -> list[OfferedBlock]:
        """What the puller wants of blocks by position, in order of position. The agent fills in the digests."""
        if self.parts == 1:  # each wanted position is a piece
            return [OfferedBlock(position, block, 0) for position, block in sorted(blocks.items())]
        return [
            OfferedBlock(piece, block, 0)
            for position, block in sorted(blocks.items())
            for piece in range(position * self.parts, (position + 1) * self.parts)
            if piece in self.wanted_pieces
        ]

    def renew(self, counter: int, now: float) -> None:
        self.heard_at = now
        self.renewed_by = max(self.renewed_by, counter)

    def step(self, state: OwnerState) -> None:
        assert state in OWNER_STEPS[self.state], f"{self.state.name} -> {state.name} is not a step of an owner"
        self.state = state
