"""Where a request goes: pure arithmetic over what the router knows of its workers.

The unit is the token of prefill work. For a pair (prefill P, decode D):

    cost = tokens queued on P + uncached prompt tokens on P + a share for each block D lacks + a share for D's load
           + a fixed price for going to another machine at all

and for D alone: tokens queued on D + uncached prompt tokens on D + the share for D's load. D alone is a candidate only
where few tokens are uncached there (`local_prefill_tokens`), or where no prefill worker is alive that has not already
failed this request. The lowest cost wins.
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
MAX_WORKERS_COMPARED = 16  # of each role, the best by their own terms; bounds the pairs


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What matters of one worker for one choice. `num_queued_tokens` is the larger of its report and our own count."""

    worker_id: str
    num_queued_tokens: int
    num_sequences: int
    cached_tokens: int  # of this request's prompt


@dataclass(frozen=True, slots=True)
class Candidate:
    prefill_worker: str | None  # None: the decode worker prefills
    decode_worker: str
    cached_tokens: int  # on the worker that would compute the prompt
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
    """Every way the request may go, cheapest first; empty where it has to wait for a worker with room.

    `prefill` and `decode` are the workers with room; `prefill_alive` says whether there is a prefill worker worth
    waiting for.
    """
    best_prefill = sorted(prefill, key=lambda w: (_compute_cost(w, num_tokens), w.worker_id))[:MAX_WORKERS_COMPARED]
    best_decode = sorted(decode, key=lambda w: (_decode_cost(w, num_tokens, block_size), w.worker_id))
    best_decode = best_decode[:MAX_WORKERS_COMPARED]
    found = [_pair(p, d, num_tokens, block_size) for p, d in product(best_prefill, best_decode)]
    found += [
        _alone(worker, num_tokens)
        for worker in best_decode
        if not prefill_alive or _uncached(worker, num_tokens) <= config.local_prefill_tokens
    ]
    return sorted(found, key=lambda c: (c.cost, c.prefill_worker or "", c.decode_worker))


def choose(found: Sequence[Candidate], num_dispatched: Mapping[str, int]) -> Candidate | None:
    """The cheapest; among equals the pair with the fewest requests of ours, so that ties spread."""
    if not found:
        return None
    equals = [candidate for candidate in found if candidate.cost == found[0].cost]

    def ours(candidate: Candidate) -> int:
        return num_dispatched.get(candidate.prefill_worker or "", 0) + num_dispatched.get(candidate.decode_worker, 0)

    return min(equals, key=ours)


def reason_for(candidate: Candidate, has_prefill_workers: bool) -> str:
    """One sentence for Explain."""
    if candidate.prefill_worker is not None:
        return f"lowest sum of queue, uncached prefill and transfer ({candidate.cost:.0f} tokens)"
    if not has_prefill_workers:
        return "no prefill worker can take it: the decode worker prefills"
    return f"only {candidate.uncached_tokens} uncached tokens: the decode worker prefills"


def _uncached(worker: WorkerView, num_tokens: int) -> int:
    # The last token is always computed: its logits are what the first output token is drawn from.
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


def _alone(decode: WorkerView, num_tokens: int) -> Candidate:
    paired = _pair(decode, decode, num_tokens, 1)
    cost = _compute_cost(decode, num_tokens) + TOKENS_PER_DECODING_SEQUENCE * decode.num_sequences
    return replace(paired, prefill_worker=None, transfer_blocks=0, cost=cost)
