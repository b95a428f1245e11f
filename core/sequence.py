"""A request inside one worker.

Each step of the scheduler brings `num_computed_tokens` closer to `num_tokens`. A new prompt has no computed token. A
sequence in decode has one token left to compute. A sequence with pulled KV arrives with a computed prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.block_hash import FullBlock, extend_full_blocks, root_hash
from core.block_pool import PrefixBlock
from core.lifecycle import FinishReason
from core.request import Request
from core.step import SequenceView

Rank = tuple[int, int]  # (priority, order of arrival); a smaller tuple ranks higher


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    arrival: int  # order of arrival at this worker; breaks ties of priority
    sample_limit: int | None = None  # ends with HANDOFF after this many tokens sampled on this worker; None = no limit
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_sampled_tokens: int = 0  # sampled on this worker
    block_table: list[int] = field(default_factory=list)  # block ids, by position; cover every computed token
    known_full_blocks: list[FullBlock] = field(default_factory=list)  # leading full blocks of token_ids, hashed so far
    num_registered_blocks: int = 0  # leading blocks that come from the prefix cache or were registered in it
    cache_parent: PrefixBlock | str | None = field(init=False)  # parent of the next block to register
    view: SequenceView = field(init=False)  # has `token_ids` and `block_table` themselves, so neither is ever replaced
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    arrived_at: float = 0.0  # time of arrival at this worker

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.token_ids)
        self.cache_parent = self.request.cache_salt
        self.view = SequenceView(
            self.request.request_id,
            self.token_ids,
            self.request.num_prompt_tokens,
            self.block_table,
            self.request.sampling,
        )

    @property
    def sequence_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def rank(self) -> Rank:
        return (self.request.priority, self.arrival)

    def full_blocks(self, block_size: int) -> list[FullBlock]:
        """All full blocks. Each block is hashed once."""
        extend_full_blocks(self.known_full_blocks, self.token_ids, block_size, root_hash(self.request.cache_salt))
        return self.known_full_blocks

    def finish_reason_after(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """The reason to end after `token_id` was appended; None if the sequence continues."""
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if len(self.token_ids) >= self.request.max_total_tokens:
            return FinishReason.LENGTH
        if self.sample_limit is not None and self.num_sampled_tokens >= self.sample_limit:
            return FinishReason.HANDOFF
        return None
