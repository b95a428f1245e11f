"""Cached prefixes that workers read from each other, as hand-offs without a prefill (docs/adr/0060), or from disk.

    owner    PrefixRequested -> an offer of cached blocks, complete at once -> the reader releases them
    reader   `add` -> all targets are INCOMING, WANT is sent -> the pull ends, or its time is over -> the scheduler
             `add` -> all targets are INCOMING, the disk is read -> likewise                     (worker/tier/)

While a prefix is on its way, its sequence waits here, and holds the part of the prefix that the worker has. At the end
of the wait, the sequence joins the scheduler without any block: what has arrived is in the prefix cache. Another
sequence that lacks the same blocks waits for the same pull. A pull that failed or was late has cost its time only. Its
targets stay reserved until no read can write into them: for a disk, which reads into a buffer, that is at once.

Neither side takes a block that others need (`WorkerCore.num_spare_blocks`). When higher ranks begin to need blocks, the
reader gives up the pull of lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.block_hash import FullBlock, extend_full_blocks, root_hash
from core.errors import TandemError
from core.handoff import MAX_POSITIONS, AbortReason, AgentAddress, PrefixSource, TransferId
from core.scheduling.block_pool import Column
from core.scheduling.ledger import Claim, SequenceState
from core.scheduling.sequence import Rank, Sequence
from kv_transfer.protocol.events import Actions, PullCompleted, PullFailed, PullGivenUp, TransferAction
from kv_transfer.protocol.machine import TransferMachine
from runtime.tracing.span_names import Attribute
from worker.core import WorkerCore, claim_of
from worker.tier import disk_tier
from worker.tier.events import BlocksCopied, BlocksRead, BlocksWritten, SlotErased, TierAction, TierEvent

MAX_PREFIX_PULLS = 16  # prefixes on their way to a worker; beyond: computed
MAX_FOLLOWERS = 16  # other prompts that wait for one pull; beyond: they pull too
PullResult = PullCompleted | PullFailed | PullGivenUp
PrefixAction = TransferAction | TierAction
PrefixActions = list[PrefixAction]


@dataclass(frozen=True, slots=True)
class PrefixRequested:
    """A router tells an owner who will read a prefix."""

    transfer_id: TransferId
    reader: AgentAddress
    token_ids: tuple[int, ...]  # of the prefix
    cache_salt: str
    limit_s: float  # the reader sends its WANT within this time, or never


@dataclass(slots=True, eq=False)
class PrefixPull:
    sequence: Sequence  # while it waits, its block table is the cached prefix
    transfer_id: TransferId
    owner: str  # name of the agent, or `disk_tier.OWNER`
    targets: list[int]  # INCOMING, in order of position
    late_at: float
    is_awaited: bool = True  # the sequence waits here
    followers: list[Sequence] = field(default_factory=list)  # wait for the same blocks; they hold none

    @property
    def waiting(self) -> list[Sequence]:
        return [self.sequence, *self.followers] if self.is_awaited else []

    @property
    def rank(self) -> Rank:
        """The highest of the sequences that wait."""
        return min(sequence.rank for sequence in self.waiting)


@dataclass(frozen=True, slots=True)
class PulledPrefix:
    """What a source has brought, for the trace of its call."""

    num_tokens: int  # 0: the pull failed, was late, or found nothing
    wait_s: float
    owner: str  # name of the agent
    num_bytes: int = 0

    def describe(self) -> dict[str, object]:
        """Attributes of the span of the queue."""
        return {
            Attribute.PREFIX_TOKENS: self.num_tokens,
            Attribute.PREFIX_WAIT_MS: self.wait_s * 1e3,
            Attribute.PREFIX_BYTES: self.num_bytes,
            Attribute.PREFIX_OWNER: self.owner,
        }


class Prefixes:
    """The prefixes that one worker gives to its peers, and those that it reads from them."""

    def __init__(self, core: WorkerCore, transfers: TransferMachine) -> None:
        self._core, self._transfers = core, transfers
        self.pulls: dict[TransferId, PrefixPull] = {}  # until no read is in flight
        self._pulled: dict[str, PulledPrefix] = {}  # of open calls, by request id

    # ---- the owner

    def offer(self, event: PrefixRequested, num_spare_blocks: int, now: float) -> Actions:
        """Offer what the prefix cache has. Blocks that no sequence holds are leased while others are to spare.

        Raises `LayoutMismatch`, `QueueFull`, or `TransferFailed` where the ticket is not new.
        """
        own, pool = self._transfers.address.layout, self._core.pool
        num_spare_blocks = max(0, num_spare_blocks)
        actions = self._transfers.offer(event.transfer_id, event.reader, now + event.limit_s, now, is_of_cache=True)
        full: list[FullBlock] = []
        most = pool.num_blocks * own.block_size  # tokens here; no event hashes more, whatever a router asks for
        extend_full_blocks(full, event.token_ids[:most], own.block_size, root_hash(event.cache_salt))
        given: list[int] = []
        for found in pool.match_prefix(full, event.cache_salt):
            num_spare_blocks -= pool.column_of(found.block) is Column.CACHED
            if num_spare_blocks < 0:
                break
            given.append(found.block)
        return actions + self._transfers.owner.add_ready(event.transfer_id, enumerate(given), True, (), now)

    # ---- the reader

    def add(
        self, sequence: Sequence, source: PrefixSource | None, num_spare_blocks: Callable[[], int], now: float
    ) -> PrefixActions:
        """The sequence joins the scheduler, at once or after its prefix has been read."""
        begun = self._begin(sequence, source, num_spare_blocks, now)
        if begun is None:
            self._core.scheduler.add(sequence)
        return begun or []

    def _begin(
        self, sequence: Sequence, source: PrefixSource | None, num_spare_blocks: Callable[[], int], now: float
    ) -> PrefixActions | None:
        """Read the prefix before the sequence joins the scheduler. None if the sequence should join at once.

        The disk goes before a peer that has no more: it needs no other worker.
        """
        scheduler, tier = self._core.scheduler, self._core.tier
        most_tokens = sequence.num_tokens - 1
        most_blocks = most_tokens // scheduler.block_size
        stored = []
        if tier is not None:
            blocks = sequence.full_blocks(scheduler.block_size)[:most_blocks]
            stored = tier.find(blocks, sequence.request.cache_salt)[:MAX_POSITIONS]
        num_offered = 0
        if source is not None and source.agent.layout == self._transfers.address.layout:
            num_offered = min(source.num_tokens // scheduler.block_size, most_blocks)
        if not (stored or num_offered):
            return None
        num_spare = num_spare_blocks()
        scheduler.hold_cached_prefix(sequence, most_tokens)
        num_held = len(sequence.block_table)
        num_spare -= num_held
        begun: PrefixActions | None = None
        if len(stored) >= num_offered:
            begun = self._begin_read(sequence, stored, num_spare, now)
        if begun is None and source is not None:
            positions = range(num_held, num_offered)[:MAX_POSITIONS]
            begun = self._begin_pull(sequence, source, positions, num_spare, now)
        if begun is None:
            scheduler.drop_blocks(sequence)
        return begun

    def _begin_pull(
        self, sequence: Sequence, source: PrefixSource, positions: range, num_spare: int, now: float
    ) -> PrefixActions | None:
        late_at = now + source.limit_s
        if self._follow(sequence, positions, late_at):
            return []
        if not self._has_room(positions, num_spare):
            return None
        try:
            actions = self._transfers.reserve_pull(source.transfer_id, source.agent, now)
        except TandemError:
            return None
        pull = self._reserve(sequence, source.transfer_id, source.agent.name, positions, late_at)
        puller = self._transfers.puller
        actions += puller.start(source.transfer_id, positions, now, may_be_short=True)
        actions += puller.add_targets(source.transfer_id, dict(zip(positions, pull.targets, strict=True)), now)
        return [*actions]

    def _begin_read(self, sequence: Sequence, stored: list[bytes], num_spare: int, now: float) -> PrefixActions | None:
        """Read the blocks with these names, which begin at the first block of the prompt, from disk."""
        tier, block_size = self._core.tier, self._core.scheduler.block_size
        assert tier is not None
        positions = range(len(sequence.block_table), len(stored))
        if not positions:
            return None
        start = positions.start * block_size
        compute_s = self._core.costs.cost.prompt_seconds(len(positions) * block_size, start)
        limit_s = tier.limit_s(len(positions), compute_s, now)
        if limit_s is None:
            return None
        late_at = now + limit_s + disk_tier.LATE_S
        if self._follow(sequence, positions, late_at):
            return []
        if not self._has_room(positions, num_spare):
            return None
        read_id = tier.new_read_id()
        pull = self._reserve(sequence, read_id, disk_tier.OWNER, positions, late_at)
        return [tier.read(read_id, stored[positions.start :], pull.targets, limit_s, now)]

    def _has_room(self, positions: range, num_spare: int) -> bool:
        return len(self.pulls) < MAX_PREFIX_PULLS and 0 < len(positions) <= num_spare

    def _reserve(
        self, sequence: Sequence, transfer_id: TransferId, owner: str, positions: range, late_at: float
    ) -> PrefixPull:
        targets = self._core.pool.reserve(len(positions))
        assert targets is not None, "spare blocks are available"
        pull = self.pulls[transfer_id] = PrefixPull(sequence, transfer_id, owner, targets, late_at)
        return pull

    def _follow(self, sequence: Sequence, positions: range, late_at: float) -> bool:
        """Wait for the pull of another sequence, if that brings all of these blocks in time."""
        pull = self._pull_of(sequence, positions, late_at) if positions else None
        if pull is None:
            return False
        self._core.scheduler.drop_blocks(sequence)
        pull.followers.append(sequence)
        return True

    def _pull_of(self, sequence: Sequence, positions: range, late_at: float) -> PrefixPull | None:
        """A pull that brings all these blocks, and is given up at `late_at` at the latest."""
        block_size = self._core.scheduler.block_size
        last = sequence.full_blocks(block_size)[positions[-1]]  # identifies the blocks before it, too
        for pull in self.pulls.values():
            first = len(pull.sequence.block_table)
            if (
                pull.is_awaited
                and pull.late_at <= late_at
                and len(pull.followers) < MAX_FOLLOWERS
                and first <= positions[0]
                and positions[-1] < first + len(pull.targets)
                and pull.sequence.full_blocks(block_size)[positions[-1]] == last
            ):
                return pull
        return None

    def owns(self, action: object) -> bool:
        """Whether this is the result of a pull that began here."""
        return isinstance(action, PullResult) and action.transfer_id in self.pulls

    def end(self, result: PullResult, now: float) -> None:
        """A pull has ended, or will fail: its sequence joins the scheduler."""
        pull, pool = self.pulls[result.transfer_id], self._core.pool
        if isinstance(result, PullGivenUp):
            self._join(pull, now)
            return
        del self.pulls[result.transfer_id]
        num_arrived = 0
        if isinstance(result, PullCompleted):
            assert pull.is_awaited, "a pull that is given up never completes"
            num_arrived = result.stats.num_blocks
            self._register(pull.sequence, pull.targets[:num_arrived])
        pool.cancel_reservation(pull.targets[num_arrived:])
        self._join(pull, now, num_arrived)

    def _register(self, sequence: Sequence, blocks: list[int]) -> None:
        scheduler = self._core.scheduler
        self._core.pool.arrive(blocks)
        sequence.block_table += blocks
        sequence.num_computed_tokens = sequence.num_planned_tokens = len(sequence.block_table) * scheduler.block_size
        scheduler.blocks.register_full_blocks(sequence)

    def _join(self, pull: PrefixPull, now: float, num_blocks: int = 0) -> None:
        layout, waiting = self._transfers.address.layout, pull.waiting
        for sequence in waiting:
            num_bytes = num_blocks * layout.block_bytes if sequence is pull.sequence else 0
            self._pulled[sequence.sequence_id] = PulledPrefix(
                num_blocks * layout.block_size, now - sequence.arrived_at, pull.owner, num_bytes
            )
        self._leave(pull, waiting)

    def _leave(self, pull: PrefixPull, joining: list[Sequence]) -> None:
        """Nothing waits for the pull any more, and these sequences join the scheduler."""
        if pull.is_awaited:
            pull.is_awaited = False
            self._core.scheduler.drop_blocks(pull.sequence)
        for sequence in joining:
            self._core.scheduler.add(sequence, has_waited=True)

    def take_pulled(self, request_id: str) -> PulledPrefix | None:
        """What the source of a call has brought; None without one. Call it at the end of each call."""
        return self._pulled.pop(request_id, None)

    def cancel(self, request_id: str, reason: AbortReason, now: float) -> Actions:
        """The call has ended. Its sequence joins nothing any more."""
        self._pulled.pop(request_id, None)
        for pull in self.pulls.values():
            names = [sequence.sequence_id for sequence in pull.waiting]
            if names[:1] == [request_id]:
                self._leave(pull, pull.followers)
                return self._cancel_pull(pull, reason, now)
            if request_id in names:
                del pull.followers[names.index(request_id) - 1]
                return []
        return []

    def give_way(self, num_spare_blocks: Callable[[Rank], int], now: float) -> Actions:
        """Give up the pull of lowest rank if higher ranks lack blocks. Call it until it returns nothing.

        `num_spare_blocks`: beside what ranks before a given one need. Negative if these lack blocks.
        """
        last = self._last_awaited
        if last is None:
            return []
        num_coming = sum(len(pull.targets) for pull in self.pulls.values() if not pull.is_awaited)
        if num_spare_blocks(last.rank) + num_coming >= 0:
            return []
        return self.give_up_last(now)

    def give_up_last(self, now: float) -> Actions:
        """Give up the pull of lowest rank. Its blocks are free once its reads have ended."""
        last = self._last_awaited
        if last is None:
            return []
        return self._cancel_pull(last, AbortReason.OVERLOADED, now)

    def _cancel_pull(self, pull: PrefixPull, reason: AbortReason, now: float) -> Actions:
        tier = self._core.tier
        if tier is not None and pull.owner == disk_tier.OWNER:
            return tier.cancel(pull.transfer_id, reason, now)
        return self._transfers.puller.cancel(pull.transfer_id, reason, now)

    # ---- the disk

    def on_disk(self, event: TierEvent, now: float) -> Actions:
        tier = self._core.tier
        assert tier is not None, "an event of a disk without a tier"
        match event:
            case BlocksCopied():
                tier.on_copied()
            case BlocksWritten():
                tier.on_written(event, now)
            case BlocksRead():
                return tier.on_read(event, now)
            case SlotErased():
                tier.on_erased(event)
        return []

    def take_given_up(self) -> list[TierAction]:
        """See `DiskTier`."""
        return [] if self._core.tier is None else self._core.tier.take_given_up()

    def write_down(self, num_spare_blocks: Callable[[], int], now: float) -> list[TierAction]:
        """See `DiskTier`."""
        return [] if self._core.tier is None else self._core.tier.write_down(num_spare_blocks, now)

    @property
    def _last_awaited(self) -> PrefixPull | None:
        awaited = (pull for pull in self.pulls.values() if pull.is_awaited)
        return max(awaited, key=lambda pull: pull.rank, default=None)

    # ---- time

    def on_tick(self, now: float) -> list[TransferAction]:
        """Give up the pulls that are late."""
        actions: Actions = []
        for pull in [pull for pull in self.pulls.values() if pull.is_awaited and now >= pull.late_at]:
            actions += self._cancel_pull(pull, AbortReason.DEADLINE, now)
        return actions

    def next_deadline(self) -> float | None:
        known = [pull.late_at for pull in self.pulls.values() if pull.is_awaited]
        if self._core.tier is not None and (resumed_at := self._core.tier.next_deadline()) is not None:
            known.append(resumed_at)
        return min(known, default=None)

    # ---- view

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for pull in self.pulls.values() for sequence in pull.waiting]

    @property
    def num_targets(self) -> int:
        return sum(len(pull.targets) for pull in self.pulls.values())

    def prompts_left(self) -> Iterable[tuple[int, int]]:
        """As `Scheduler.prompts_left`: what a waiting sequence will have to compute, at best, if its pull completes."""
        block_size = self._core.scheduler.block_size
        for pull in self.pulls.values():
            num_blocks = len(pull.sequence.block_table) + len(pull.targets)
            for sequence in pull.waiting:
                start = min(num_blocks, (sequence.num_tokens - 1) // block_size) * block_size
                yield sequence.num_tokens - start, start

    def claims(self) -> list[Claim]:
        return [claim_of(s, SequenceState.TRANSFER) for s in self.waiting if s.block_table]

    def check(self) -> None:
        assert len(self.pulls) <= MAX_PREFIX_PULLS
        assert all(len(pull.followers) <= MAX_FOLLOWERS for pull in self.pulls.values())
        reads = set() if self._core.tier is None else self._core.tier.reads
        assert self.pulls.keys() <= self._transfers.puller.pulls.keys() | reads
        assert reads <= self.pulls.keys()
        assert self._pulled.keys() <= self._core.open_calls.timelines.keys()
        for sequence in self.waiting:
            assert self._core.scheduler.get(sequence.sequence_id) is None, "a waiting sequence is in the scheduler"
            assert sequence.sequence_id in self._core.open_calls.timelines
