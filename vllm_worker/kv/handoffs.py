"""What a vLLM engine gives to its peers, as its scheduler sees it. All calls come from the engine's thread.

    an offer    on_new_request -> begin_step, end_step ... -> finish   the blocks stay lent until the reader has them
    a move      begin_move -> begin_step, end_step ... -> finish       an offer of a request that goes on until then
                                                  '-> the reader is gone: no offer any more, and `step_stats` tells it
    a prefix    give_prefix: cached blocks are lent, all at once       the reader pulls the first tokens of a prompt

What it reads from them is in vllm_worker/kv/pulls.py.

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

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.handoff import TransferId
from core.scheduling.ledger import Claim
from vllm_worker.engine import EngineTransfer
from vllm_worker.kv.ledger import encode_holders
from vllm_worker.kv.parameters import (
    HOLDERS,
    LOST_MOVES,
    NUM_LENT,
    PULLED_TOKENS,
    READ_BYTES,
    READ_SECONDS,
    RequestEnd,
    decode_prefix,
    decode_transfer,
    name_of,
)
from vllm_worker.kv.pulls import EnginePulls, Pull
from vllm_worker.kv.transfers import BlocksComputed, OfferBegun, OfferCancelled, Transfers, taken

COMPUTED = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})  # the ends of requests that have a token


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


class Handoffs:
    def __init__(self, transfers: Transfers, block_size: int) -> None:
        self.pulls = EnginePulls(transfers, block_size)
        self._transfers, self._block_size = transfers, block_size
        self._pool: LendingPool | None = None
        self._offers: dict[str, _Offer] = {}  # by request id
        self._num_lent = 0  # references to blocks that transfers have
        self._unheld = Counter[int]()  # blocks that were lent from the prefix cache, and that no request held
        self._step: dict[str, Sequence[int]] = {}  # the blocks of offers in the step that runs, by request id
        self._named: dict[str, Any] = {}  # requests, by the name that the worker gives them
        self._lost_moves: list[TransferId] = []  # that the worker does not know yet
        self._claims: tuple[Claim, ...] = ()
        self._holders: list[list[Any]] = []  # of `_claims`
        self._told_bytes, self._told_seconds = 0, 0.0  # of reads, up to the step before

    def bind(self, pool: LendingPool, hashes_of: BlockHashes) -> None:
        self._pool, self._hashes_of = pool, hashes_of

    # ---- requests

    def on_new_request(self, request: Any) -> None:
        self.take_back()
        if name := name_of(request.kv_transfer_params):
            self._named[name] = request
        transfer, prefix = decode_transfer(request.kv_transfer_params), decode_prefix(request.kv_transfer_params)
        if transfer is not None and not transfer.is_offer:
            self.pulls.begin(Pull(transfer.transfer_id, request, transfer.is_move), transfer.peer)
            return
        if transfer is not None and self._offer_of(transfer.transfer_id) is None:
            self._offers[request.request_id] = offer = _Offer(transfer, request, request.num_prompt_tokens)
            self._open(offer)
        if prefix is not None:
            self.pulls.begin(Pull(prefix.transfer_id, request, False, prefix), prefix.agent, prefix.limit_s)

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
        return RequestEnd(is_moved, self.pulls.finish(request.request_id))

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
            self._transfers.post(OfferBegun(transfer.transfer_id, transfer.peer, transfer.deadline, transfer.is_move))

    def begin_step(self, scheduled: Collection[str], block_ids_of: Callable[[str], Sequence[int]]) -> None:
        """`scheduled`: requests of the step."""
        self.pulls.is_idle = not scheduled
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

    def give_prefix(self, transfer: EngineTransfer, token_ids: Sequence[int], cache_salt: str) -> None:
        """Lend what the prefix cache has of these tokens. Call it between two steps, when all of it is written.

        Blocks that no request holds are lent while as many others stay free, however many ask. The ticket of an offer
        that runs gets nothing: its reader would take the cached blocks for those of its prompt.
        """
        pool = self._pool
        assert pool is not None
        if self._offer_of(transfer.transfer_id) is not None:
            return
        num_spare, given = (pool.get_num_free_blocks() - self._unheld.total()) // 2, list[Any]()
        for block_hash in self._hashes_of(token_ids, cache_salt):
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            if not found[0].ref_cnt:
                num_spare -= 1
                if num_spare < 0:
                    break
                self._unheld[found[0].block_id] += 1
            given += found
        pool.touch(given)
        self._num_lent += len(given)
        self._transfers.post(OfferBegun(transfer.transfer_id, transfer.peer, transfer.deadline, is_of_cache=True))
        lent = tuple((position, block.block_id) for position, block in enumerate(given))
        self._transfers.post(BlocksComputed(transfer.transfer_id, lent, is_last=True))

    def take_back(self) -> None:
        """Give vLLM the blocks that no reader needs any more."""
        if self._transfers.failure:
            raise RuntimeError(f"the KV transfers of this engine have ended: {self._transfers.failure}")
        blocks, pool = self._transfers.machine.blocks, self._pool
        if pool is None:
            return
        if corrupt := taken(blocks.corrupt):
            pool.evict_blocks(set(corrupt))
        if freed := taken(blocks.freed):
            pool.free_blocks([pool.blocks[block] for block in freed])
            self._num_lent -= len(freed)
            self._unheld -= Counter(freed)
        for transfer_id in taken(self._transfers.machine.caught_up):
            self._end_soon(transfer_id)
        for transfer_id in taken(self._transfers.machine.ended_offers):
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
        holds_blocks = self._num_lent or self.pulls.by_id  # else the claims may be those of a moment ago
        lost = [f"{transfer_id:032x}" for transfer_id in (*self._lost_moves, *self.pulls.lost_moves)]
        self._lost_moves.clear()
        self.pulls.lost_moves.clear()
        pulled = [[f"{transfer_id:032x}", list(token_ids)] for transfer_id, token_ids in self.pulls.pulled_tokens]
        self.pulls.pulled_tokens.clear()
        counters = self._transfers.machine.transfers.counters
        read_bytes, read_seconds = counters.num_bytes_read, counters.read_seconds
        new_bytes, new_seconds = read_bytes - self._told_bytes, read_seconds - self._told_seconds
        self._told_bytes, self._told_seconds = read_bytes, read_seconds
        return {
            NUM_LENT: self._num_lent,
            HOLDERS: self._holders if holds_blocks else [],
            LOST_MOVES: lost,
            PULLED_TOKENS: pulled,
            READ_BYTES: new_bytes,
            READ_SECONDS: new_seconds,
        }

    def check(self) -> None:
        """Every transfer has a request, and every request at most one of each kind."""
        self.pulls.check()
        assert len({offer.transfer_id for offer in self._offers.values()}) == len(self._offers)
