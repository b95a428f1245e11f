"""One offer: the blocks leased for it, the pieces its puller wants, and the pieces announced so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.handoff import OWNER_STEPS, AbortReason, AgentAddress, OfferedBlocks, OwnerState, TransferId
from kv_transfer.protocol.plan import TransferPlan


@dataclass(slots=True, eq=False)
class Offer:
    transfer_id: TransferId
    peer: AgentAddress  # the puller
    plan: TransferPlan
    created_at: float
    renewed_at: float  # last sign of life of the puller; the lease runs from here
    deadline: float  # of the request: afterwards nobody needs the blocks
    is_of_cache: bool = False  # of the prefix cache: it may stay unwanted, and digests are computed with the WANT
    state: OwnerState = OwnerState.COMPUTING
    leased: dict[int, int] = field(default_factory=dict)  # position -> block
    wanted_pieces: frozenset[int] = frozenset()
    wanted: frozenset[int] | None = None  # positions; None before the WANT
    # announced: wanted and readable, in this order
    announced_pieces: list[int] = field(default_factory=list)
    announced_blocks: list[int] = field(default_factory=list)  # one for each piece
    last: bool = False  # nothing more will be offered
    num_before_last: int = 0  # pieces announced before `last` was known
    token_ids: tuple[int, ...] = ()  # for the last READY
    newest: int = 0  # counter of the newest WANT or RELEASE
    renewed_by: int = 0  # counter of the newest message that renewed the lease
    ready_sent_at: float = 0.0
    want_answered_at: float = -math.inf
    num_unplaced: int = 0  # announced pieces that the puller cannot read yet, as its newest heartbeat says
    aborting: AbortReason | None = None  # the offer ends with this reason, once no read can be running
    detail: str = ""

    def ends_at(self, lease_s: float) -> float:
        """An offer that no message ends is aborted at the deadline of its request, or ends with its lease before. After
        an abort nothing renews the lease, so no puller holds blocks for longer than `lease_s` after the deadline."""
        lease_end = self.renewed_at + lease_s
        return lease_end if self.aborting is not None else min(lease_end, self.deadline)

    @property
    def may_be_read(self) -> bool:
        return bool(self.announced_pieces)

    def is_caught_up_by(self, num_verified: int) -> bool:
        """Whether a puller that has verified so many pieces waits for the next ones."""
        return (
            self.wanted is not None and not self.last and self.aborting is None and num_verified == self.num_announced
        )

    def has_reached(self, num_received: int) -> bool:
        """Whether every READY has arrived at a puller that has received so many pieces. A last READY with pieces
        arrives with them; the arrival of one without pieces is unknown."""
        return num_received >= self.num_announced and (not self.last or num_received > self.num_before_last)

    @property
    def starved(self) -> bool:
        """Blocks are leased, and the puller has no room for them."""
        return bool(self.leased) and (self.wanted is None or self.num_unplaced > 0)

    @property
    def num_announced(self) -> int:
        return len(self.announced_pieces)

    def want(self, pieces: Sequence[int]) -> frozenset[int]:
        """Record the pieces that the puller lacks. Returns the positions of their blocks."""
        parts = self.plan.source_parts
        self.wanted_pieces = wanted = frozenset(pieces)
        self.wanted = wanted if parts == 1 else frozenset(piece // parts for piece in pieces)
        return self.wanted

    def announce(self, blocks: Mapping[int, int]) -> None:
        """Announce the wanted pieces of blocks, given by position, in order of position."""
        positions, parts = sorted(blocks), self.plan.source_parts
        if parts == 1:  # each wanted position is a piece
            self.announced_pieces += positions
            self.announced_blocks += [blocks[position] for position in positions]
            return
        for position in positions:
            pieces = range(position * parts, (position + 1) * parts)
            wanted = [piece for piece in pieces if piece in self.wanted_pieces]
            self.announced_pieces += wanted
            self.announced_blocks += [blocks[position]] * len(wanted)

    def announced(self, first: int, end: int) -> OfferedBlocks:
        """Announced pieces [first, end). The agent fills in the digests."""
        pieces = tuple(self.announced_pieces[first:end])
        return OfferedBlocks(pieces, tuple(self.announced_blocks[first:end]), (0,) * len(pieces))

    def renew(self, counter: int, now: float) -> None:
        self.renewed_at = now
        self.renewed_by = max(self.renewed_by, counter)

    def step(self, state: OwnerState) -> None:
        assert state in OWNER_STEPS[self.state], f"{self.state.name} -> {state.name} is not a step of an owner"
        self.state = state
