"""Admits hand-offs, and gives their pulls blocks of the pool.

    arrives --room for all its blocks--> admitted: holds its cached prefix, WANT is sent --> takes a target for each
                                         block that the owner announces --> has all targets --> complete

A target is taken when its block is announced, so a prompt that is computed for seconds leaves the rest of the pool to
others. Everything that takes blocks has a rank (priority, then arrival): pulls, and the scheduler's sequences. Pulls
take blocks in rank order, and leave one block for the next tokens of each running sequence and of each pulled prompt:

    1. The first pull that lacks blocks takes what there is.
    2. A pull behind it takes a target only if the rest of the pool covers what the half-pulled prompts before it still
       need; or if it gets its last targets.
    3. If the whole rest of the pool cannot serve a pull, no pull and no new sequence of lower rank takes a block, so
       freed blocks add up for this pull.

So half-pulled prompts do not fill the pool together. Priorities and growing sequences can still fill it with holders
that all wait. Then no step runs, and rank decides: the highest-ranked of those that lack blocks gets the blocks of the
lowest-ranked holder, if that ranks lower (`victim`). A running sequence gets them at once, others after MAX_STALL_S.

No circle of waiters is possible: a waiter either outranks a holder, and then takes its blocks, or waits for holders
that rank higher. Rank is a total order, so such a chain has an end: a sequence that runs, a pull whose reads end, or a
pull that waits for its owner. Sequences and reads end by themselves. An owner that can compute no prompt withdraws
offers whose readers lack blocks (prefill_worker/machine.py), and a lost owner fails its pulls.
`scheduler.refuse_oversized` keeps out what does not fit into the whole pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from core.handoff import TransferId
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Rank, Sequence, by_rank

GROWTH_TOKENS = 256  # that a sequence may get while it moves here; at its end, it waits
MAX_STALL_S = 1.0  # without a step, a pull or a queued sequence that lacks blocks; beyond: lower ranks lose theirs


@dataclass(slots=True, eq=False)
class PulledPrompt:
    """A hand-off from its arrival until its last read has ended."""

    sequence: Sequence  # its block table is the cached prefix
    transfer_id: TransferId
    num_positions: int  # blocks of the prompt, the cached prefix included; of a growing sequence, those to come too
    is_growing: bool = False  # a running sequence of another worker, which moves here
    admitted: bool = False
    announced: list[int] = field(default_factory=list)  # positions that need a target, in the order of announcement
    targets: dict[int, int] = field(default_factory=dict)  # position -> INCOMING block
    call_ended: bool = False

    @property
    def num_missing(self) -> int:
        """Blocks that the pull has yet to take."""
        return self.num_positions - len(self.sequence.block_table) - len(self.targets)

    @property
    def lacks_blocks(self) -> bool:
        return not self.call_ended and (not self.admitted or bool(self.announced))

    @property
    def ends_by_itself(self) -> bool:
        """Every block is announced and has its target: reads are all that is left."""
        return bool(self.targets) and not self.num_missing and not self.call_ended

    @property
    def holds_blocks(self) -> bool:
        return bool(self.targets or self.sequence.block_table)


def _rank(pull: PulledPrompt) -> Rank:
    return pull.sequence.rank


class PullQueue:
    """The open hand-offs of a decode worker. Uses the scheduler's queues, and changes none of them."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self.by_id: dict[TransferId, PulledPrompt] = {}  # in order of arrival
        self.blocked_rank: Rank | None = None  # of the first pull that the pool cannot serve
        self._lacking: list[PulledPrompt] = []  # those that lack blocks, in rank order
        self._admitted: dict[TransferId, PulledPrompt] = {}  # those with a WANT: only these can hold blocks
        self._num_changes = 0  # of `_lacking`
        self._last_inputs: object = None  # what `give_blocks` saw at the end of its last pass
        self._stalled_since: float | None = None

    @property
    def lacks_blocks(self) -> bool:
        """Whether a hand-off could take a block that becomes free."""
        return bool(self._lacking)

    @property
    def num_waiting(self) -> int:
        """Hand-offs without a WANT. They hold no block."""
        return sum(not pull.admitted for pull in self._lacking)

    def num_promised_blocks(self, before: Rank | None = None) -> int:
        """Blocks that the open hand-offs, or those that rank higher than `before`, have yet to take."""
        pulls = (pull for pull in self.by_id.values() if before is None or _rank(pull) < before)
        return sum(pull.num_missing for pull in pulls if not pull.call_ended)

    @property
    def num_half_pulled(self) -> int:
        """Hand-offs that hold targets and have yet to take more."""
        return sum(bool(pull.targets and pull.num_missing and not pull.call_ended) for pull in self.by_id.values())

    # ---- changes

    def add(self, sequence: Sequence, transfer_id: TransferId, *, is_growing: bool) -> None:
        num_tokens = sequence.num_tokens
        if is_growing:
            num_tokens = max(num_tokens, min(num_tokens + GROWTH_TOKENS, sequence.max_num_tokens - 1))
        num_positions = -(-num_tokens // self._scheduler.block_size)
        self.by_id[transfer_id] = pull = PulledPrompt(sequence, transfer_id, num_positions, is_growing)
        self._note(pull)

    def announce(self, transfer_id: TransferId, positions: Iterable[int], *, is_last: bool = False) -> None:
        """Each position needs a target block. With `is_last` no others follow, so a growing sequence has its length."""
        pull = self.by_id[transfer_id]
        if not pull.call_ended:
            pull.announced += positions
            if is_last and pull.is_growing:
                pull.num_positions = max((*pull.announced, *pull.targets), default=-1) + 1
            self._note(pull)

    def end_call(self, pull: PulledPrompt) -> None:
        """The hand-off takes no more blocks. It keeps its targets until `remove`."""
        pull.call_ended = True
        self._note(pull)

    def remove(self, transfer_id: TransferId) -> PulledPrompt:
        """The hand-off has ended, and so have its reads. The caller frees its blocks, or makes them the sequence's."""
        pull = self.by_id.pop(transfer_id)
        self._admitted.pop(transfer_id, None)
        place = self._place_of(pull)
        if place is not None:
            del self._lacking[place]
        self._num_changes += 1
        return pull

    def _note(self, pull: PulledPrompt) -> None:
        """Call after each change of `pull`."""
        self._num_changes += 1
        place = self._place_of(pull)
        if pull.lacks_blocks and place is None:
            insort(self._lacking, pull, key=_rank)
        elif place is not None and not pull.lacks_blocks:
            del self._lacking[place]

    def _place_of(self, pull: PulledPrompt) -> int | None:
        """Index of the pull in `_lacking`, in logarithmic time; ranks are unique. None if it is not there."""
        place = bisect_left(self._lacking, _rank(pull), key=_rank)
        return place if place < len(self._lacking) and self._lacking[place] is pull else None

    # ---- giving blocks

    def give_blocks(self) -> Iterator[tuple[PulledPrompt, dict[int, int] | None]]:
        """Each pull that gets something: its new targets, or None if it is admitted and its WANT goes out.

        The caller may call any other method between two results.
        """
        if self._lacking and self._last_inputs == self._inputs():
            return
        self.blocked_rank = None
        for pull in list(self._lacking):
            if not pull.lacks_blocks:
                continue  # ended meanwhile
            if self._is_behind_a_prompt(pull):
                self.blocked_rank = _rank(pull)
                break
            if not pull.admitted:
                if not self._admit(pull):
                    self.blocked_rank = _rank(pull)
                    break
                yield pull, None
                continue
            is_blocked = len(pull.announced) > self._num_free
            targets = self._take_targets(pull)
            if targets:
                yield pull, targets
            if is_blocked:
                self.blocked_rank = _rank(pull)
                break
        self._last_inputs = self._inputs()

    def _inputs(self) -> object:
        """Equal results mean that another pass of `give_blocks` would give nothing."""
        waiting = self._scheduler.waiting
        first = waiting[0].rank if waiting else None
        return self._num_changes, self._pool.num_changes, self._num_free, first, len(waiting)

    @property
    def _num_free(self) -> int:
        """Available blocks, less one for each sequence that runs or has a pulled prompt: its next tokens need it."""
        num_growing = len(self._scheduler.running) + len(self._scheduler.queues.waiting_with_blocks)
        return self._pool.num_available - num_growing

    def _is_behind_a_prompt(self, pull: PulledPrompt) -> bool:
        """Waiting sequences of higher rank get their blocks before, if the pool has too few for them and the pull."""
        scheduler, block_size = self._scheduler, self._scheduler.block_size
        older = scheduler.waiting[: bisect_left(scheduler.waiting, _rank(pull), key=by_rank)]
        waiting = [sequence for sequence in older if not sequence.block_table]
        if not waiting:
            return False
        half_computed = [s for s in scheduler.queues.prefilling.values() if s.rank < _rank(pull)]
        needed = pull.num_missing
        for sequence in chain(half_computed, waiting):
            needed += -(-sequence.num_tokens // block_size) - len(sequence.block_table)
            if needed > self._num_free:
                return True
        return False

    def _admit(self, pull: PulledPrompt) -> bool:
        """Hold the cached prefix if there is room for all other blocks now. Nothing is promised to the pull."""
        sequence = pull.sequence
        # The newest token of a growing sequence is not computed, perhaps, so its block may have to be written.
        self._scheduler.hold_cached_prefix(sequence, sequence.num_tokens - pull.is_growing)
        if self._num_free < pull.num_missing:
            self._scheduler.drop_blocks(sequence)
            return False
        pull.admitted = True
        self._admitted[pull.transfer_id] = pull
        self._note(pull)
        return True

    def _take_targets(self, pull: PulledPrompt) -> dict[int, int]:
        num_announced, num_free = len(pull.announced), self._num_free
        if num_announced < pull.num_missing or num_announced > num_free:
            num_free -= self._num_promised_before(pull)
        blocks = self._pool.reserve(max(min(num_announced, num_free), 0)) or []
        targets = dict(zip(pull.announced, blocks, strict=False))
        if targets:
            del pull.announced[: len(targets)]
            pull.targets |= targets
            self._stalled_since = None
            self._note(pull)
        return targets

    def _num_promised_before(self, pull: PulledPrompt) -> int:
        """Blocks that half-pulled prompts of higher rank have yet to take, with one for the first tokens of each."""
        half_pulled = (other for other in self._admitted.values() if other.targets and not other.call_ended)
        return sum(other.num_missing + 1 for other in half_pulled if _rank(other) < _rank(pull))

    # ---- when nothing runs

    def victim(self, now: float) -> Sequence | PulledPrompt | None:
        """The holder that has to give its blocks to a higher rank now. Preempt a sequence; end the call of a pull.

        Call this after `give_blocks` and after the attempt to plan a step, until the result is None.
        """
        waiter, holder = self._stalled_rank(), self._last_holder()
        if waiter is None or holder is None or holder[0] <= waiter:
            self._stalled_since = None  # something moves, or the waiter waits for higher ranks
            return None
        if self._stalled_since is None:
            self._stalled_since = now
        is_running = any(s.rank == waiter for s in self._scheduler.running if not s.is_held_back)
        frees_soon = any(pull.call_ended for pull in self._admitted.values())
        if now < self._stalled_since + MAX_STALL_S and (frees_soon or not is_running):
            return None
        self._stalled_since = None
        return holder[1]

    def next_deadline(self) -> float | None:
        """When to call `victim` again."""
        return None if self._stalled_since is None else self._stalled_since + MAX_STALL_S

    def _stalled_rank(self) -> Rank | None:
        """The highest rank that lacks blocks, if no step runs and no pull ends by itself."""
        scheduler = self._scheduler
        if scheduler.num_steps_in_flight or any(pull.ends_by_itself for pull in self._admitted.values()):
            return None
        running = next((sequence for sequence in scheduler.running if not sequence.is_held_back), None)
        ranks = [sequence.rank for sequence in (running, *scheduler.waiting[:1]) if sequence is not None]
        return min(ranks + [_rank(pull) for pull in self._lacking[:1]], default=None)

    def _last_holder(self) -> tuple[Rank, Sequence | PulledPrompt] | None:
        holders: list[tuple[Rank, Sequence | PulledPrompt]] = [
            (_rank(pull), pull) for pull in self._admitted.values() if pull.holds_blocks and not pull.call_ended
        ]
        last = self._scheduler.last_holder
        if last is not None:
            holders.append((last.rank, last))
        return max(holders, key=lambda holder: holder[0], default=None)

    def check(self) -> None:
        lacking = [pull for pull in self.by_id.values() if pull.lacks_blocks]
        assert self._lacking == sorted(lacking, key=_rank)
        assert self._admitted == {name: pull for name, pull in self.by_id.items() if pull.admitted}
        for transfer_id, pull in self.by_id.items():
            assert transfer_id == pull.transfer_id
            assert pull.admitted or not (pull.holds_blocks or pull.announced), "a hand-off without a WANT holds blocks"
            assert pull.targets.keys().isdisjoint(pull.announced)
            prompt = range(len(pull.sequence.block_table), pull.num_positions)
            assert all(position in prompt for position in (*pull.targets, *pull.announced))
