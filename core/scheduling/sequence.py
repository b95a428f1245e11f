"""A request inside one worker.

    0 ........ num_computed_tokens ........ num_planned_tokens ........ len(token_ids) .... max_num_tokens
      computed                     in the steps in flight      to be planned

Each step of the scheduler brings `num_computed_tokens` closer to `len(token_ids)`. A new prompt has no computed token.
A sequence in decode has one token left to compute. A sequence with pulled KV arrives with a computed prompt. If the
steps in flight reach the end of `token_ids`, the newest of them samples a token that is promised, but not known yet.

A sequence that moves to another worker is planned up to `plan_end` only: 0 while it is paused.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from core.block_hash import FullBlock, extend_full_blocks, root_hash
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.block_pool import PrefixBlock
from core.step import NO_PROPOSAL, Proposal, SequenceView

# (priority, time at which the request was new, order of arrival at this worker); a smaller tuple ranks higher
Rank = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    arrival: int  # order of arrival at this worker; breaks ties of priority and age
    sample_limit: int | None = None  # ends with HANDOFF after this many tokens sampled on this worker; None = no limit
    token_ids: list[int] = field(default_factory=list)  # never replaced: the view has the same list
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0  # computed tokens after the steps in flight; written by `Scheduler` only
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    block_table: list[int] = field(default_factory=list)  # block ids, by position; cover every planned token
    known_full_blocks: list[FullBlock] = field(default_factory=list)  # leading full blocks of token_ids, hashed so far
    num_registered_blocks: int = 0  # leading blocks that come from the prefix cache or were registered in it
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # computed ones, at the newest preemption
    num_recomputed_tokens: int = 0  # computed again after a preemption, or after a move that failed at its end
    is_moving: bool = False  # a peer reads its blocks, so its preemption would free none
    proposal: Proposal = NO_PROPOSAL  # this and the next two belong to core/scheduling/drafts.py
    proposed_at: int = 0  # the proposal continues after this many tokens
    draft_bias: float = 0.0  # its recent share of right guesses minus the mean of the worker
    num_drafts: int = 0  # guesses that steps have computed
    num_right_drafts: int = 0  # ... and that were right
    arrived_at: float = 0.0  # time of arrival at this worker
    sequence_id: str = field(init=False)
    rank: Rank = field(init=False)
    max_num_tokens: int = field(init=False)  # the sequence ends with this length at the latest
    plan_end: int = field(init=False)  # steps plan as if it ended with this length: `max_num_tokens`, or less in a move
    view: SequenceView = field(init=False)
    cache_parent: PrefixBlock | str | None = field(init=False)  # parent of the next block to register
    stop_token_ids: frozenset[int] = field(init=False, default=frozenset())  # belongs to the scheduler
    num_counted_tokens: int = field(init=False, default=0)  # belongs to `SequenceQueues`

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.token_ids)
        self.sequence_id = self.request.request_id
        self.rank = (self.request.priority, self.arrived_at - self.request.age_s, self.arrival)
        self.max_num_tokens = self.request.max_total_tokens
        if self.sample_limit is not None:
            self.max_num_tokens = min(self.max_num_tokens, len(self.token_ids) + self.sample_limit)
        self.plan_end = self.max_num_tokens
        self.cache_parent = self.request.cache_salt
        self._renew_view()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_held_back(self) -> bool:
        """No step plans another token: it moves to another worker, or its promised token is the last one."""
        return self.num_planned_tokens + 1 >= self.plan_end

    def keep_blocks(self, num_blocks: int, block_size: int) -> list[int]:
        """Keep the first blocks only, which are full. Returns the others. The table gets a new view."""
        given_up = self.block_table[num_blocks:]
        self.block_table = self.block_table[:num_blocks]
        self.num_computed_tokens = self.num_planned_tokens = num_blocks * block_size
        self._renew_view()
        return given_up

    def forget_blocks(self) -> None:
        """Start again with an empty block table, which gets a new view: the table of a view never shrinks."""
        self.block_table = []
        self.num_registered_blocks = self.num_computed_tokens = self.num_planned_tokens = 0
        self.cache_parent = self.request.cache_salt
        self._renew_view()

    def _renew_view(self) -> None:
        request = self.request
        self.view = SequenceView(
            request.request_id, self.token_ids, request.num_prompt_tokens, self.block_table, request.sampling
        )

    def full_blocks(self, block_size: int) -> list[FullBlock]:
        """All full blocks. Each block is hashed once."""
        known = self.known_full_blocks
        if (len(known) + 1) * block_size <= len(self.token_ids):
            extend_full_blocks(known, self.token_ids, block_size, root_hash(self.request.cache_salt))
        return known

    def finish_reason_after(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """The reason to end after `token_id` was appended; None if the sequence continues."""
        if token_id in self.request.sampling.stop_tokens(eos_token_ids):
            return FinishReason.STOP
        if len(self.token_ids) >= self.request.max_total_tokens:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if len(self.token_ids) >= self.max_num_tokens else None


# ---- lists of sequences in rank order


by_rank = attrgetter("rank")


def remove_ranked(queue: list[Sequence], sequence: Sequence) -> bool:
    """Remove `sequence` from a list in rank order, in logarithmic time. Returns False if the list does not have it."""
    place = bisect_left(queue, sequence.rank, key=by_rank)
    while place < len(queue) and queue[place].rank == sequence.rank:
        if queue[place] is sequence:
            del queue[place]
            return True
        place += 1
    return False
