"""What a vLLM engine reads from its peers, as its scheduler sees it. All calls come from the engine's thread.

    begin -> num_to_load -> place -> loads() -> finish      vLLM schedules the request after its load

While a prompt reads its prefix, another one that lacks the same blocks and has a source too waits for that read, until
its own limit at most: then it finds the blocks in vLLM's prefix cache.

The rules of vLLM's scheduler (vllm_worker/kv/hooks.py), which ends the engine when one is broken:

  - a load that was placed ends exactly once, in `loads`, also if its request was aborted meanwhile: vLLM keeps the
    blocks until then, because reads may still write into them;
  - a load that was not placed is never named.

`request` is vLLM's `Request` everywhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core.handoff import AbortReason, AgentAddress, PrefixSource, TransferId
from kv_transfer.protocol.events import PullCompleted, PullEnded, PullFailed
from vllm_worker.kv.transfers import PullBegun, PullCancelled, TargetsGiven, Transfers, taken

# vLLM steps without a pause while a load or a lent block is left, also if it has nothing to compute: a step each
# millisecond, half of a core of its own and of the worker's. A step that computes nothing may last this long.
IDLE_STEP_S = 0.01

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers


@dataclass(slots=True)
class Pull:
    transfer_id: TransferId
    request: Any
    is_move: bool
    prefix: PrefixSource | None = None  # of a pull that brings the first blocks of a prompt
    num_local_tokens: int = 0
    is_placed: bool = False


@dataclass(slots=True)
class Loads:
    """Loads that have ended, by request. A failed one is computed again by vLLM."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # of `received`


class EnginePulls:
    """`lost_moves`: those whose blocks have not come. `pulled_tokens`: those that came with blocks, by transfer."""

    def __init__(self, transfers: Transfers, block_size: int) -> None:
        self._transfers, self._block_size = transfers, block_size
        self.by_id: dict[str, Pull] = {}  # by request id
        self.lost_moves: list[TransferId] = []
        self.pulled_tokens: list[tuple[TransferId, tuple[int, ...]]] = []
        self.is_idle = False  # the step that runs computes nothing
        self._puller_of: dict[TransferId, str] = {}  # request ids
        self._num_read: dict[str, int] = {}  # tokens of prefixes that pulls have brought, by request id

    def begin(self, pull: Pull, owner: AgentAddress, limit_s: float = math.inf) -> None:
        if pull.transfer_id not in self._puller_of:
            self.by_id[pull.request.request_id] = pull
            self._puller_of[pull.transfer_id] = pull.request.request_id
            self._transfers.post(PullBegun(pull.transfer_id, owner, limit_s))

    def _num_wanted(self, pull: Pull) -> int:
        """Tokens of the prompt, with those that are cached here. Those of a prefix fill blocks."""
        num_tokens = int(pull.request.num_prompt_tokens)
        if pull.prefix is None:
            return num_tokens
        return min(pull.prefix.num_tokens, num_tokens - 1) // self._block_size * self._block_size

    def finish(self, request_id: str) -> int | None:
        """The request has ended. Returns the tokens of the prefix that it has read; None: no read began."""
        pull = self.by_id.get(request_id)
        if pull is not None:
            self._cancel(request_id, pull)
        return self._num_read.pop(request_id, None)

    def num_to_load(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens that come from another engine, behind those that are cached here. No side effects.

        None: another request reads some of them; ask again in the next step.
        """
        pull = self.by_id.get(request.request_id)
        if pull is None or pull.is_placed:
            return 0
        if pull.prefix is not None and self._is_on_its_way(pull, num_local_tokens // self._block_size):
            return None
        return max(0, self._num_wanted(pull) - num_local_tokens)

    def _is_on_its_way(self, pull: Pull, num_local_blocks: int) -> bool:
        """Whether another request reads the first block that this prefix lacks, and what follows as far as both go."""
        hashes = pull.request.block_hashes
        for other in self.by_id.values():
            if other.prefix is None or not other.is_placed or other.request.is_finished():
                continue
            last = min(self._num_wanted(pull), self._num_wanted(other)) // self._block_size - 1
            if num_local_blocks <= last < len(hashes) and hashes[last] == other.request.block_hashes[last]:
                return True
        return False

    def place(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has allocated blocks for all tokens. Without external ones, this is the step after the load."""
        pull = self.by_id.get(request.request_id)
        if pull is None or pull.is_placed:
            return
        if not num_external_tokens:  # vLLM computes the prompt by itself
            self._cancel(request.request_id, pull)
            return
        pull.is_placed = True
        num_tokens = self._num_wanted(pull)
        pull.num_local_tokens = num_tokens - num_external_tokens
        first = pull.num_local_tokens // self._block_size
        end = -(-num_tokens // self._block_size)
        targets = dict(enumerate(block_ids[first:end], first))
        most, known = (num_tokens + request.max_tokens, num_tokens) if pull.is_move else (None, None)
        is_prefix = pull.prefix is not None
        self._transfers.post(TargetsGiven(pull.transfer_id, targets, most, known, may_be_short=is_prefix))

    def loads(self) -> Loads:
        """The loads that have ended since the last call, which was in the step before."""
        if self.is_idle:
            self._transfers.wait_for_news(IDLE_STEP_S)
        ended = Loads()
        for outcome in taken(self._transfers.machine.outcomes):
            request_id = self._puller_of.pop(outcome.transfer_id, None)
            pull = None if request_id is None else self.by_id.pop(request_id, None)
            if request_id is None or pull is None:
                continue
            if pull.prefix is not None:
                self._end_prefix(pull, outcome, ended)
                continue
            if isinstance(outcome, PullFailed):
                self._note_failed(pull, outcome)
                ended.failed |= {request_id} if pull.is_placed else set()
            if pull.is_placed:
                ended.received.add(request_id)
                if isinstance(outcome, PullCompleted) and not pull.request.is_finished():
                    self._take_tokens(pull, outcome.token_ids)
        return ended

    def _end_prefix(self, pull: Pull, outcome: PullEnded, ended: Loads) -> None:
        """vLLM computes what has not come. A prompt that found no room in time has begun no read."""
        request, is_late = pull.request, isinstance(outcome, PullFailed) and outcome.reason is AbortReason.DEADLINE
        num_read = outcome.stats.num_blocks * self._block_size if isinstance(outcome, PullCompleted) else 0
        if pull.is_placed:
            ended.received.add(request.request_id)
            ended.failed |= set() if num_read else {request.request_id}
        if request.is_finished():
            return
        if pull.is_placed or not is_late:
            self._num_read[request.request_id] = num_read
        if num_read:
            request.num_computed_tokens = pull.num_local_tokens + num_read
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=pull.num_local_tokens,
                num_external_cached_tokens=num_read,
            )

    def _note_failed(self, pull: Pull, outcome: PullFailed) -> None:
        """vLLM computes the prompt, unless the worker ends the request: its owner may still sample."""
        if pull.is_move:
            self.lost_moves.append(pull.transfer_id)
        elif not pull.request.is_finished():
            request_id, why = pull.request.request_id, outcome.detail or outcome.reason.value
            logger.warning("vLLM computes the prompt of request %s: its KV did not come (%s)", request_id, why)

    def _take_tokens(self, pull: Pull, token_ids: tuple[int, ...]) -> None:
        """Make tokens of the owner a part of the prompt, so that the next step samples behind them.

        A token that ends the output is sampled again, and ends the request. So is a token that the owner has not sent.
        The statistics of the request tell the worker how many tokens are taken, and those of this step tell the tokens:
        the owner may die before it has sent them.
        """
        request = pull.request
        num_tokens, sampling = request.num_prompt_tokens, request.sampling_params
        stop_token_ids = sampling.stop_token_ids or ()
        is_again = not token_ids or request.max_tokens <= len(token_ids) or token_ids[-1] in stop_token_ids
        num_taken = 0 if is_again else len(token_ids)
        num_cached = num_tokens - 1 + num_taken
        request.prefill_stats.set(
            num_prompt_tokens=max(num_tokens, num_cached),
            num_local_cached_tokens=pull.num_local_tokens,
            num_external_cached_tokens=num_cached - pull.num_local_tokens,
        )
        if is_again:
            return
        request.prompt_token_ids.extend(token_ids)
        request._all_token_ids.extend(token_ids)
        request.num_prompt_tokens += num_taken
        request.max_tokens -= num_taken
        request.update_block_hashes()
        self.pulled_tokens.append((pull.transfer_id, token_ids))

    def _cancel(self, request_id: str, pull: Pull) -> None:
        """A load that was placed goes on until its outcome."""
        self._transfers.post(PullCancelled(pull.transfer_id))
        if not pull.is_placed:
            del self.by_id[request_id]
            del self._puller_of[pull.transfer_id]

    def check(self) -> None:
        """Every pull has a request, and every request at most one."""
        assert {pull.transfer_id: request_id for request_id, pull in self.by_id.items()} == self._puller_of
