"""The routing policy: the cost of every way that a request may take, computed from the reports of the workers.

The unit is one token of prefill work. For a pair (prefill worker P, decode worker D):

    cost = tokens queued on P + uncached prompt tokens on P + a price for each block that D lacks
           + a price for each sequence on D + a fixed price for the second worker

For D alone: tokens queued on D + uncached prompt tokens on D + the price for each sequence on D. D alone is a candidate
if at most `local_prefill_tokens` tokens are uncached there, if no prefill worker serves, or if every serving one has
failed the request. The lowest cost wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from core.config import RouterConfig
from core.lifecycle import RequestPath

# Prices in tokens of prefill work. A block of 16 tokens moves in about the time one token takes to compute.
TOKENS_PER_MISSING_BLOCK = 1.0
TOKENS_PER_DECODING_SEQUENCE = 8.0
TOKENS_PER_DISPATCH = 32.0
MAX_WORKERS_COMPARED = 16  # of each role: those with the lowest cost of their own; bounds the number of pairs


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as the policy compares it for one request."""

    worker_id: str
    num_queued_tokens: int  # the larger one of the worker's report and the router's own count
    num_sequences: int  # likewise
    cached_tokens: int  # of the prompt of this request


@dataclass(frozen=True, slots=True)
class Candidate:
    prefill_worker: str | None  # None: the decode worker computes the prompt
    decode_worker: str
    cached_tokens: int  # on the worker that computes the prompt
    uncached_tokens: int
    queued_tokens: int
    decode_load: int
    transfer_blocks: int
    cost: float

    @property
    def path(self) -> RequestPath:
        return RequestPath.LOCAL if self.prefill_worker is None else RequestPath.DISAGGREGATED


def candidates(
    num_tokens: int,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    prefill_alive: bool,
    config: RouterConfig,
    block_size: int,
) -> list[Candidate]:
    """Every candidate for a request, cheapest first; empty if the request has to wait for a worker with room.

    `prefill` and `decode` are the workers with room. `prefill_alive` is True if a prefill worker serves, with room or
    without, that has not failed the request. A request with a long uncached prompt then waits for that worker.
    """
    best_prefill = sorted(prefill, key=lambda w: (_compute_cost(w, num_tokens), w.worker_id))[:MAX_WORKERS_COMPARED]
    best_decode = sorted(decode, key=lambda w: (_decode_cost(w, num_tokens, block_size), w.worker_id))
    best_decode = best_decode[:MAX_WORKERS_COMPARED]
    found = [_pair(p, d, num_tokens, block_size) for p, d in product(best_prefill, best_decode)]
    found += [
        _local(worker, num_tokens)
        for worker in best_decode
        if not prefill_alive or _uncached(worker, num_tokens) <= config.local_prefill_tokens
    ]
    return sorted(found, key=lambda c: (c.cost, c.prefill_worker or "", c.decode_worker))


def choose(found: Sequence[Candidate], num_dispatched: Mapping[str, int]) -> Candidate | None:
    """The cheapest candidate; among equals, the one whose workers have the fewest requests of this router."""
    if not found:
        return None
    equals = [candidate for candidate in found if candidate.cost == found[0].cost]

    def num_on_workers(candidate: Candidate) -> int:
        return num_dispatched.get(candidate.prefill_worker or "", 0) + num_dispatched.get(candidate.decode_worker, 0)

    return min(equals, key=num_on_workers)


def reason_for(candidate: Candidate, has_prefill_workers: bool) -> str:
    """The sentence of `ExplainResponse.reason`."""
    if candidate.prefill_worker is not None:
        return f"lowest sum of queue, uncached prefill and transfer ({candidate.cost:.0f} tokens)"
    if not has_prefill_workers:
        return "no prefill worker serves: the decode worker computes the prompt"
    return f"only {candidate.uncached_tokens} uncached tokens: the decode worker computes the prompt"


def _uncached(worker: WorkerView, num_tokens: int) -> int:
    # The last prompt token is always computed: the first output token is drawn from its logits.
    return max(1, num_tokens - worker.cached_tokens)


def _compute_cost(worker: WorkerView, num_tokens: int) -> float:
    return worker.num_queued_tokens + _uncached(worker, num_tokens)


def _missing_blocks(worker: WorkerView, num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size) - worker.cached_tokens // block_size


def _decode_cost(worker: WorkerView, num_tokens: int, block_size: int) -> float:
    moved = TOKENS_PER_MISSING_BLOCK * _missing_blocks(worker, num_tokens, block_size)
    return moved + TOKENS_PER_DECODING_SEQUENCE * worker.num_sequences


def _pair(prefill: WorkerView, decode: WorkerView, num_tokens: int, block_size: int) -> Candidate:
    return Candidate(
        prefill_worker=prefill.worker_id,
        decode_worker=decode.worker_id,
        cached_tokens=num_tokens - _uncached(prefill, num_tokens),
        uncached_tokens=_uncached(prefill, num_tokens),
        queued_tokens=prefill.num_queued_tokens,
        decode_load=decode.num_sequences,
        transfer_blocks=_missing_blocks(decode, num_tokens, block_size),
        cost=_compute_cost(prefill, num_tokens) + _decode_cost(decode, num_tokens, block_size) + TOKENS_PER_DISPATCH,
    )


def _local(decode: WorkerView, num_tokens: int) -> Candidate:
    paired = _pair(decode, decode, num_tokens, 1)
    cost = _compute_cost(decode, num_tokens) + TOKENS_PER_DECODING_SEQUENCE * decode.num_sequences
    return replace(paired, prefill_worker=None, transfer_blocks=0, cost=cost)
