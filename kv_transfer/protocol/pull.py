"""One pull: which blocks are announced, read and verified, and how long the lease is known to run.

Every wanted block (or piece of a block, where the layouts differ) goes announced -> to_read -> in flight -> verified,
and back to to_read when its digest does not match. An announced block without a target is unplaced until
`add_targets` gives it one.

The lease: the owner acknowledges a message of ours by its counter, and keeps the blocks for lease_s after it received
that message, so at least until (our time of sending) + lease_s, on our own clock. No expired offer revives, so one such
moment later than our last read proves that the blocks were leased to us during all our reads.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.handoff import PULLER_STEPS, AgentAddress, OfferedBlocks, PullerState, TransferId
from kv_transfer.protocol.events import PullFailed, PullStats
from kv_transfer.protocol.plan import TransferPlan


@dataclass(slots=True, eq=False)
class Pull:
    transfer_id: TransferId
    owner: AgentAddress
    plan: TransferPlan
    created_at: float
    state: PullerState = PullerState.RESERVED
    targets: dict[int, int] = field(default_factory=dict)  # position -> block of ours; grows until the end of the pull
    wanted: frozenset[int] = frozenset()  # pieces of the plan; where layouts are equal, a piece is a position
    num_known_tokens: int | None = None  # of a sequence that grows during the pull; None: it does not
    max_new_tokens: int = 1  # that the last READY may bring
    may_be_short: bool = False  # the owner may end with the first of the wanted blocks only
    num_pieces: int = 0  # of the longest sequence that fits: piece numbers are smaller
    ending: PullFailed | None = None  # the result that follows the end of the reads, once the pull has failed
    newest: int = 0  # counter of the owner's newest READY or ABORT
    # announced by the owner
    announced: set[int] = field(default_factory=set)  # positions
    all_announced: bool = False  # the last READY has come
    all_announced_at: float = 0.0
    token_ids: tuple[int, ...] = ()  # those that we did not know; with the last READY
    # state of the blocks
    unplaced: list[OfferedBlocks] = field(default_factory=list)  # their positions have no target yet
    to_read: deque[OfferedBlocks] = field(default_factory=deque)  # each is one read, rising by block
    reads: dict[int, OfferedBlocks] = field(default_factory=dict)  # in flight, by read id
    verified: set[int] = field(default_factory=set)  # positions
    mismatches: Counter[int] = field(default_factory=Counter)  # failed digests, by position
    num_reported: int = -1  # verified blocks, as a heartbeat has told the owner that waits for them
    # the lease
    sent: dict[int, float] = field(default_factory=dict)  # counter of a WANT or heartbeat of ours -> when
    num_unanswered: int = 0  # heartbeats that listed this pull since the owner's last answer
    first_heartbeat: int | None = None  # counter of the first one that listed this pull
    known_to_owner: bool = False
    lease_until: float = -math.inf
    read_ended_at: float = -math.inf  # the latest
    # statistics
    num_reads: int = 0
    read_s: float = 0.0  # of reads that have finished

    @property
    def everything_verified(self) -> bool:
        return self.all_announced and len(self.verified) == len(self.wanted)

    @property
    def want_arrived(self) -> bool:
        return self.newest > 0  # the owner answers a WANT with a READY at once, an empty one if no block is ready

    @property
    def lease_covers_reads(self) -> bool:
        return self.lease_until > self.read_ended_at

    def step(self, state: PullerState) -> None:
        if state is not self.state:
            assert state in PULLER_STEPS[self.state], f"{self.state.name} -> {state.name} is not a step of a puller"
            self.state = state

    @property
    def has_news(self) -> bool:
        """The owner of a growing sequence waits to hear that all of its blocks so far are verified."""
        num_verified = len(self.verified)
        is_caught_up = num_verified == len(self.announced) and self.want_arrived and not self.all_announced
        return self.num_known_tokens is not None and is_caught_up and num_verified > self.num_reported

    def end_growth(self, token_ids: tuple[int, ...]) -> bool:
        """The sequence has got its last blocks here. Returns False if it has outgrown the wanted pieces."""
        if self.num_known_tokens is None:
            return True
        num_computed = self.num_known_tokens + len(token_ids) - 1
        num_pieces = -(-num_computed // self.plan.piece_tokens)
        self.wanted = self.wanted.intersection(range(num_pieces))
        return num_pieces <= self.num_pieces

    def end_early(self) -> None:
        """The owner has announced all it has. Want no more, if these are the first of the wanted pieces."""
        if self.may_be_short and self.announced == (first := set(sorted(self.wanted)[: len(self.announced)])):
            self.wanted = frozenset(first)

    def can_read(self, offered: OfferedBlocks) -> bool:
        """Whether these blocks lie in the owner's pool, and their positions are wanted and not yet announced."""
        positions = set(offered.positions)
        return (
            len(positions) == len(offered)
            and positions <= self.wanted
            and positions.isdisjoint(self.announced)
            and min(offered.blocks, default=0) >= 0
            and max(offered.blocks, default=0) < self.owner.num_blocks
        )

    @property
    def num_unplaced(self) -> int:
        return sum(map(len, self.unplaced))

    def record_ready(self, offered: OfferedBlocks, blocks_per_read: int) -> tuple[int, ...]:
        """Record announced blocks. Returns the positions that need a target and did not before, in order."""
        known = {position for blocks in self.unplaced for position in self._target_positions(blocks)}
        self.announced.update(offered.positions)
        self._place(offered, blocks_per_read)
        new = dict.fromkeys(self._target_positions(offered))
        return tuple([position for position in new if position not in self.targets and position not in known])

    def add_targets(self, targets: Mapping[int, int], blocks_per_read: int) -> None:
        """Queue the announced blocks that have a target now."""
        self.targets.update(targets)
        unplaced, self.unplaced = self.unplaced, []
        for offered in unplaced:
            self._place(offered, blocks_per_read)

    def _place(self, offered: OfferedBlocks, blocks_per_read: int) -> None:
        """Queue the announced blocks that have a target, and keep the others unplaced."""
        positions = self._target_positions(offered)
        if self.targets.keys().isdisjoint(positions):
            placed, unplaced = OfferedBlocks(), offered
        elif self.targets.keys() >= set(positions):
            placed, unplaced = offered, OfferedBlocks()
        else:
            rows = list(zip(offered, positions, strict=True))
            placed = OfferedBlocks.of(row for row, position in rows if position in self.targets)
            unplaced = OfferedBlocks.of(row for row, position in rows if position not in self.targets)
        starts = range(0, len(placed), blocks_per_read)
        self.to_read += [placed.cut(first, first + blocks_per_read).by_block() for first in starts]
        self.unplaced += [unplaced] if len(unplaced) else []

    def _target_positions(self, offered: OfferedBlocks) -> tuple[int, ...]:
        """The position of the target block of each piece."""
        parts = self.plan.target_parts
        return offered.positions if parts == 1 else tuple([piece // parts for piece in offered.positions])

    def renew(self, ack: int) -> None:
        """Record that the owner renewed the lease when it received our message `ack`."""
        sent_at = self.sent.get(ack)
        if sent_at is None:
            return  # acknowledged before, or no message of ours
        self.known_to_owner = True
        self.lease_until = max(self.lease_until, sent_at + self.owner.lease_s)
        self.sent = {counter: at for counter, at in self.sent.items() if counter > ack}

    def begin_read(self, read_id: int, blocks: OfferedBlocks) -> None:
        self.reads[read_id] = blocks
        self.num_reads += 1

    def end_read(self, read_id: int, now: float) -> OfferedBlocks:
        blocks = self.reads.pop(read_id)
        self.read_ended_at = now
        return blocks

    def verify(self, blocks: OfferedBlocks, digests: tuple[int, ...]) -> list[int]:
        """Compare the digests of blocks that were read; none where digests are off. Returns the positions that do not
        match and will be read again."""
        if digests in ((), blocks.digests):
            self.verified.update(blocks.positions)
            return []
        # 0: the owner sent no digest
        wrong = [row for row, digest in zip(blocks, digests, strict=True) if row.digest not in (0, digest)]
        positions = [row.position for row in wrong]
        self.verified.update(set(blocks.positions).difference(positions))
        self.mismatches.update(positions)
        if wrong:
            self.to_read.append(OfferedBlocks.of(wrong))
        return positions

    def stats(self, now: float) -> PullStats:
        return PullStats(
            num_blocks=len(self.wanted) if self.may_be_short else len(self.targets),
            num_bytes=len(self.wanted) * self.plan.piece_bytes,
            num_reads=self.num_reads,
            num_blocks_reread=self.mismatches.total(),
            total_s=now - self.created_at,
            read_s=self.read_s,
            exposed_s=now - self.all_announced_at,
            owner=self.owner.name,
        )

    def check(self) -> None:
        assert PULLER_STEPS[self.state], "an ended pull is still alive"
        assert (self.state is PullerState.READING) == bool(self.reads)
        assert self.ending is None or self.reads, "a failed pull without reads is still alive"
        if self.ending is None:
            placed = [position for blocks in (*self.reads.values(), *self.to_read) for position in blocks.positions]
            placed += self.verified
            unplaced = [position for blocks in self.unplaced for position in blocks.positions]
            assert sorted(placed + unplaced) == sorted(self.announced)
            parts = self.plan.target_parts
            assert all(position // parts in self.targets for position in placed)
            assert all(position // parts not in self.targets for position in unplaced)
