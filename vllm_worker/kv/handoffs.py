"""The hand-offs of a vLLM engine, as its scheduler sees them. All calls come from the engine's thread.

    an offer    on_new_request -> begin_step, end_step ... -> finish   the blocks stay lent until the reader has them
    a move      begin_move -> begin_step, end_step ... -> finish       an offer of a request that goes on until then
                                                  '-> the reader is gone: no offer any more, and `step_stats` tells it
    a pull      on_new_request -> num_to_load -> place -> loads()      vLLM schedules the request after its load
    a prefix    give_prefix: cached blocks are lent, all at once       the reader pulls the first tokens of a prompt

The rules of vLLM's scheduler (vllm_worker/kv/hooks.py), which ends the engine when one is broken:

  - a load that was placed ends exactly once, in `loads`, also if its request was aborted meanwhile: vLLM keeps the
    blocks until then, because reads may still write into them;
  - a load that was not placed is never named.

A block is offered behind the end of the step that wrote it, whichever request wrote it. vLLM enters a block into its
prefix cache when it schedules the step, so a second request with the same prefix may join that step with blocks that
count as computed and are not written yet. So nothing is offered while a step runs: `begin_step` notes the blocks of its
requests, `end_step` offers them.

A request that moves ends with the next token after its reader has caught up, as if that token were its last one. So
vLLM ends it by itself, behind a step, and nothing writes into its last block any more. Its offer begins together with
its first blocks: a reader that is there before them would have caught up with nothing.

`request` is vLLM's `Request` everywhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.handoff import AbortReason, AgentAddress, PrefixSource, TransferId
from core.scheduling.ledger import Claim
from kv_transfer.protocol.events import PullCompleted, PullEnded, PullFailed
from vllm_worker.engine import EngineTransfer
from vllm_worker.kv.ledger import encode_holders
from vllm_worker.kv.parameters import HOLDERS, LOST_MOVES, NUM_LENT, RequestEnd, decode_prefix, decode_transfer, name_of
from vllm_worker.kv.transfers import (
    BlocksComputed,
    Command,
    EngineTransfers,
    OfferBegun,
    OfferCancelled,
    PullBegun,
    PullCancelled,
    TargetsGiven,
)

COMPUTED = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})  # the ends of requests that have a token

# vLLM steps without a pause while a load or a lent block is left, also if it has nothing to compute: a step each
# millisecond, half of a core of its own and of the worker's. A step that computes nothing may last this long.
IDLE_STEP_S = 0.01

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers


class Transfers(Protocol):
    """`TransferThread`."""

    machine: EngineTransfers
    failure: str

    def post(self, command: Command) -> None: ...

    def wait_for_news(self, timeout_s: float) -> None: ...


class LendingPool(Protocol):
    """vLLM's `BlockPool`."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def evict_blocks(self, block_ids: set[int]) -> None: ...

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...

    def get_num_free_blocks(self) -> int: ...


BlockHashes = Callable[[Sequence[int], str], Iterable[Any]]  # vLLM's, of the full blocks of these tokens and this salt


@dataclass(slots=True)
class _Offer:
    transfer: EngineTransfer
    request: Any
    num_tokens: int  # that the reader knows, and whose blocks it wants
    max_tokens: int | None = None  # of a request that moves; None: a prompt is handed off
    num_published: int = 0  # full blocks
    is_open: bool = False  # the transfers know it

    @property
    def transfer_id(self) -> TransferId:
        return self.transfer.transfer_id

    @property
    def num_settled(self) -> int:
        """Tokens whose KV no step writes any more."""
        request = self.request
        num_computed = int(request.num_computed_tokens - request.num_in_flight_tokens)
        return max(0, min(num_computed, self.num_tokens))

    @property
    def is_moved(self) -> bool:
        """Whether the request has ended because it moves. Then it must go on elsewhere, with its blocks or without."""
        request = self.request
        is_capped = request.status.name == "FINISHED_LENGTH_CAPPED"
        return self.max_tokens is not None and is_capped and request.num_output_tokens < self.max_tokens

    @property
    def is_complete(self) -> bool:
        """The request has ended. Whether the reader can go on with it."""
        request = self.request
        if self.max_tokens is None:
            goes_on = request.status.name in COMPUTED and request.num_output_tokens > 0
        else:
            goes_on = self.is_moved
        return goes_on and self.num_settled == self.num_tokens


@dataclass(slots=True)
class _Pull:
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


class Handoffs:
    def __init__(self, transfers: Transfers, block_size: int) -> None:
        self._transfers, self._block_size = transfers, block_size
        self._pool: LendingPool | None = None
        self._offers: dict[str, _Offer] = {}  # by request id
        self._num_lent = 0  # references to blocks that transfers have
        self._step: dict[str, Sequence[int]] = {}  # the blocks of offers in the step that runs, by request id
        self._is_idle = False  # the step that runs computes nothing
        self._pulls: dict[str, _Pull] = {}  # by request id
        self._puller_of: dict[TransferId, str] = {}  # request ids
        self._pulled_tokens: dict[str, tuple[int, ...]] = {}  # by id of a request that has got tokens with its blocks
        self._num_read: dict[str, int] = {}  # tokens of prefixes that pulls have brought, by request id
        self._named: dict[str, Any] = {}  # requests, by the name that the worker gives them
        self._lost_moves: list[TransferId] = []  # that the worker does not know yet
        self._claims: tuple[Claim, ...] = ()
        self._holders: list[list[Any]] = []  # of `_claims`

    def bind(self, pool: LendingPool, hashes_of: BlockHashes) -> None:
        self._pool, self._hashes_of = pool, hashes_of

    # ---- requests

    def on_new_request(self, request: Any) -> None:
        self.take_back()
        if name := name_of(request.kv_transfer_params):
            self._named[name] = request
        transfer, prefix = decode_transfer(request.kv_transfer_params), decode_prefix(request.kv_transfer_params)
        if transfer is not None and not transfer.is_offer:
            self._begin_pull(_Pull(transfer.transfer_id, request, transfer.is_move), transfer.peer)
            return
        if transfer is not None and self._offer_of(transfer.transfer_id) is None:
            self._offers[request.request_id] = offer = _Offer(transfer, request, request.num_prompt_tokens)
            self._open(offer)
        if prefix is not None:
            self._begin_pull(_Pull(prefix.transfer_id, request, False, prefix), prefix.agent, prefix.limit_s)

    def finish(self, request: Any, block_ids: Sequence[int]) -> RequestEnd:
        """The request has ended; vLLM frees its blocks after this call, but keeps those that are lent."""
        name = name_of(request.kv_transfer_params)
        if self._named.get(name) is request:
            del self._named[name]
        is_moved = False
        offer = self._offers.pop(request.request_id, None)
        if offer is not None:
            self._finish_offer(offer, block_ids)
            is_moved = offer.is_moved
        pull = self._pulls.get(request.request_id)
        if pull is not None:
            self._cancel(request.request_id, pull)
        num_read = self._num_read.pop(request.request_id, None)
        return RequestEnd(self._pulled_tokens.pop(request.request_id, ()), is_moved, num_read)

    # ---- moves

    def begin_move(self, name: str, transfer: EngineTransfer, num_known_tokens: int) -> None:
        """Give a running request to a peer, of which the peer knows so many tokens. Call it between two steps.

        The move is lost for a request that has just ended, and whose last output is on its way, or that moves already.
        """
        request = self._named.get(name)
        is_offered = request is not None and request.request_id in self._offers
        if request is None or is_offered or self._offer_of(transfer.transfer_id) is not None:
            self._lost_moves.append(transfer.transfer_id)
            return
        self._offers[request.request_id] = _Offer(transfer, request, num_known_tokens, request.max_tokens)

    def end_move(self, name: str, transfer_id: TransferId) -> None:
        """The request goes on here, unless it has left."""
        request = self._named.get(name)
        offer = None if request is None else self._offers.get(request.request_id)
        if offer is None or offer.transfer_id != transfer_id:
            return
        self._drop_move(offer)
        self._transfers.post(OfferCancelled(transfer_id))

    def _end_soon(self, transfer_id: TransferId) -> None:
        """The reader of a request that moves has caught up."""
        offer = self._offer_of(transfer_id)
        if offer is not None and offer.max_tokens is not None:
            offer.request.max_tokens = min(offer.max_tokens, offer.request.num_output_tokens + 1)

    def _lose_move(self, transfer_id: TransferId) -> None:
        """The reader of a running request is gone, or has not come."""
        offer = self._offer_of(transfer_id)
        if offer is not None and offer.max_tokens is not None:
            self._drop_move(offer)
            self._lost_moves.append(transfer_id)

    def _drop_move(self, offer: _Offer) -> None:
        offer.request.max_tokens = offer.max_tokens
        del self._offers[offer.request.request_id]

    # ---- offers

    def _offer_of(self, transfer_id: TransferId) -> _Offer | None:
        return next((offer for offer in self._offers.values() if offer.transfer_id == transfer_id), None)

    def _open(self, offer: _Offer) -> None:
        if not offer.is_open:
            offer.is_open, transfer = True, offer.transfer
            self._transfers.post(OfferBegun(transfer.transfer_id, transfer.peer, transfer.is_move))

    def begin_step(self, scheduled: Collection[str], block_ids_of: Callable[[str], Sequence[int]]) -> None:
        """`scheduled`: requests of the step."""
        self._is_idle = not scheduled
        self._step = {request_id: block_ids_of(request_id) for request_id in self._offers.keys() & scheduled}

    def end_step(self) -> None:
        """Offer the blocks that ended steps have filled. A request that has ended with the step is none of them."""
        for request_id, offer in self._offers.items():
            self._open(offer)
            self._lend(offer, self._step.get(request_id, ())[: offer.num_settled // self._block_size])
        self._step = {}

    def _finish_offer(self, offer: _Offer, block_ids: Sequence[int]) -> None:
        """The rest of the blocks follows, with the partly filled one, and the tokens that the reader lacks."""
        if not offer.is_complete:
            self._transfers.post(OfferCancelled(offer.transfer_id))
            return
        num_blocks = -(-offer.num_tokens // self._block_size)
        token_ids = tuple(map(int, offer.request._all_token_ids[offer.num_tokens :]))
        self._lend(offer, block_ids[:num_blocks], token_ids)

    def _lend(self, offer: _Offer, block_ids: Sequence[int], token_ids: tuple[int, ...] = ()) -> None:
        """Lend the blocks that were not lent before. After a preemption, the earlier ones stay those of before it."""
        pool, first = self._pool, offer.num_published
        assert pool is not None
        new = tuple(enumerate(block_ids[first:], first))
        if not new and not token_ids:
            return
        pool.touch([pool.blocks[block] for _, block in new])
        self._num_lent += len(new)
        offer.num_published = first + len(new)
        self._transfers.post(BlocksComputed(offer.transfer_id, new, bool(token_ids), token_ids))

    def give_prefix(self, transfer: EngineTransfer, token_ids: Sequence[int], cache_salt: str, limit_s: float) -> None:
        """Lend what the prefix cache has of these tokens. Call it between two steps, when all of it is written.

        Blocks that no request holds are lent while as many others stay free.
        """
        pool = self._pool
        assert pool is not None
        num_spare, given = pool.get_num_free_blocks() // 2, list[Any]()
        for block_hash in self._hashes_of(token_ids, cache_salt):
            found = pool.get_cached_block(block_hash, [0])
            num_spare -= found is not None and not found[0].ref_cnt
            if found is None or num_spare < 0:
                break
            given += found
        pool.touch(given)
        self._num_lent += len(given)
        self._transfers.post(OfferBegun(transfer.transfer_id, transfer.peer, limit_s=limit_s))
        lent = tuple((position, block.block_id) for position, block in enumerate(given))
        self._transfers.post(BlocksComputed(transfer.transfer_id, lent, is_last=True))

    def take_back(self) -> None:
        """Give vLLM the blocks that no reader needs any more."""
        if self._transfers.failure:
            raise RuntimeError(f"the KV transfers of this engine have ended: {self._transfers.failure}")
        blocks, pool = self._transfers.machine.blocks, self._pool
        if pool is None:
            return
        if corrupt := _taken(blocks.corrupt):
            pool.evict_blocks(set(corrupt))
        if freed := _taken(blocks.freed):
            pool.free_blocks([pool.blocks[block] for block in freed])
            self._num_lent -= len(freed)
        for transfer_id in _taken(self._transfers.machine.caught_up):
            self._end_soon(transfer_id)
        for transfer_id in _taken(self._transfers.machine.ended_offers):
            self._lose_move(transfer_id)

    @property
    def num_lent(self) -> int:
        """References to blocks that transfers have.

        Until they are back, the engine must step: vLLM calls its connector in steps only.
        """
        return self._num_lent

    def step_stats(self) -> dict[str, Any]:
        """For the worker, with each step."""
        claims, pool = self._transfers.machine.claims, self._pool
        if claims is not self._claims and pool is not None:
            self._claims, self._holders = claims, encode_holders(claims, pool.blocks)
        holds_blocks = self._num_lent or self._pulls  # else the claims may be those of a moment ago
        lost, self._lost_moves = [f"{transfer_id:032x}" for transfer_id in self._lost_moves], []
        return {NUM_LENT: self._num_lent, HOLDERS: self._holders if holds_blocks else [], LOST_MOVES: lost}

    # ---- pulls

    def _begin_pull(self, pull: _Pull, owner: AgentAddress, limit_s: float = math.inf) -> None:
        if pull.transfer_id not in self._puller_of:
            self._pulls[pull.request.request_id] = pull
            self._puller_of[pull.transfer_id] = pull.request.request_id
            self._transfers.post(PullBegun(pull.transfer_id, owner, limit_s))

    def _num_wanted(self, pull: _Pull) -> int:
        """Tokens of the prompt, with those that are cached here. Those of a prefix fill blocks."""
        num_tokens = int(pull.request.num_prompt_tokens)
        if pull.prefix is None:
            return num_tokens
        return min(pull.prefix.num_tokens, num_tokens - 1) // self._block_size * self._block_size

    def num_to_load(self, request: Any, num_local_tokens: int) -> int:
        """Tokens that come from another engine, behind those that are cached here. No side effects."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.is_placed:
            return 0
        return max(0, self._num_wanted(pull) - num_local_tokens)

    def place(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has allocated blocks for all tokens. Without external ones, this is the step after the load."""
        pull = self._pulls.get(request.request_id)
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
        if self._is_idle:
            self._transfers.wait_for_news(IDLE_STEP_S)
        ended = Loads()
        for outcome in _taken(self._transfers.machine.outcomes):
            request_id = self._puller_of.pop(outcome.transfer_id, None)
            pull = None if request_id is None else self._pulls.pop(request_id, None)
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

    def _end_prefix(self, pull: _Pull, outcome: PullEnded, ended: Loads) -> None:
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

    def _note_failed(self, pull: _Pull, outcome: PullFailed) -> None:
        """vLLM computes the prompt, unless the worker ends the request: its owner may still sample."""
        if pull.is_move:
            self._lost_moves.append(pull.transfer_id)
        elif not pull.request.is_finished():
            request_id, why = pull.request.request_id, outcome.detail or outcome.reason.value
            logger.warning("vLLM computes the prompt of request %s: its KV did not come (%s)", request_id, why)

    def _take_tokens(self, pull: _Pull, token_ids: tuple[int, ...]) -> None:
        """Make tokens of the owner a part of the prompt, so that the next step samples behind them.

        A token that ends the output is sampled again, and ends the request. The statistics of the request tell the
        worker how many tokens are taken.
        """
        request = pull.request
        num_tokens, sampling = request.num_prompt_tokens, request.sampling_params
        ends = request.max_tokens <= len(token_ids) or token_ids[-1] in (sampling.stop_token_ids or ())
        num_taken = 0 if ends else len(token_ids)
        num_cached = num_tokens - 1 + num_taken
        request.prefill_stats.set(
            num_prompt_tokens=max(num_tokens, num_cached),
            num_local_cached_tokens=pull.num_local_tokens,
            num_external_cached_tokens=num_cached - pull.num_local_tokens,
        )
        if ends:
            return
        request.prompt_token_ids.extend(token_ids)
        request._all_token_ids.extend(token_ids)
        request.num_prompt_tokens += num_taken
        request.max_tokens -= num_taken
        request.update_block_hashes()
        self._pulled_tokens[request.request_id] = token_ids

    def _cancel(self, request_id: str, pull: _Pull) -> None:
        """A load that was placed goes on until its outcome."""
        self._transfers.post(PullCancelled(pull.transfer_id))
        if not pull.is_placed:
            del self._pulls[request_id]
            del self._puller_of[pull.transfer_id]

    def check(self) -> None:
        """Every transfer has a request, and every request at most one of each kind."""
        assert len({offer.transfer_id for offer in self._offers.values()}) == len(self._offers)
        assert {pull.transfer_id: request_id for request_id, pull in self._pulls.items()} == self._puller_of


def _taken(queue: Any) -> list[Any]:
    """What is in a deque now; another thread may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
