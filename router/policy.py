"""The routing policy: the cost of every way that a request may take, computed from the loads of the workers.

The unit is one token of prefill work. For a pair (prefill worker P, decode worker D):

    cost = tokens queued on P + uncached prompt tokens on P + a price for each block that D lacks
           + a price for each sequence on D + a fixed price for the second worker

For D alone: tokens queued on D + uncached prompt tokens on D + the price for each sequence on D. D alone is a candidate
if at most `local_prefill_tokens` tokens are uncached there, if no prefill worker serves, or if every serving one has
failed the request. The lowest cost wins; among equals, the workers with the fewest requests of this router.

The cost of a pair is the sum of a term of P, a term of D and a constant. So the cheapest pair consists of the cheapest
of each, and `choose` compares workers, not pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product

from core.config import RouterConfig
from core.lifecycle import RequestPath

# Prices in tokens of prefill work. A block of 16 tokens moves in about the time one token takes to compute.
TOKENS_PER_MISSING_BLOCK = 1.0
TOKENS_PER_DECODING_SEQUENCE = 8.0
TOKENS_PER_DISPATCH = 32.0
MAX_WORKERS_COMPARED = 16  # of each role: those with the lowest cost of their own; bounds the number of candidates


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as the policy compares it for all requests."""

    worker_id: str
    num_queued_tokens: int  # as the worker reports, and those of calls that the report does not have yet
    num_sequences: int  # likewise
    num_dispatched: int  # requests of this router


Option = tuple[WorkerView, int]  # a worker with room, and the number of tokens of the prompt that it has cached


# The part of a worker in a cost: (cost, its requests of this router, its name, the worker, its cached tokens). A plain
# tuple, because each decision makes and compares hundreds.
_Term = tuple[float, int, str, WorkerView, int]


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
    num_dispatched: int  # requests of this router on the workers

    @property
    def path(self) -> RequestPath:
        return RequestPath.LOCAL if self.prefill_worker is None else RequestPath.DISAGGREGATED

    @property
    def order(self) -> tuple[float, int, str, str]:
        return self.cost, self.num_dispatched, self.prefill_worker or "", self.decode_worker


class Policy:
    """The candidates for one request of `num_tokens`.

    `prefill` and `decode` are the workers with room. `prefill_alive` is True if a prefill worker serves, with room or
    without, that has not failed the request. A request with a long uncached prompt then waits for that worker.
    `block_size` is that of the decode workers.
    """

    def __init__(
        self,
        num_tokens: int,
        prefill: Sequence[Option],
        decode: Sequence[Option],
        prefill_alive: bool,
        config: RouterConfig,
        block_size: int,
    ) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._num_blocks = -(-num_tokens // block_size)
        most_uncached = config.local_prefill_tokens if prefill_alive else num_tokens
        self._prefill: list[_Term] = [
            (self._compute_cost(worker, cached), worker.num_dispatched, worker.worker_id, worker, cached)
            for worker, cached in prefill
        ]
        self._decode: list[_Term] = [
            (self._decode_cost(worker, cached), worker.num_dispatched, worker.worker_id, worker, cached)
            for worker, cached in (decode if prefill else ())
        ]
        self._local: list[_Term] = [
            (self._local_cost(worker, cached), worker.num_dispatched, worker.worker_id, worker, cached)
            for worker, cached in decode
            if self._uncached(cached) <= most_uncached
        ]

    def choose(self) -> Candidate | None:
        """The first of `candidates()`; None if there is none, and the request has to wait for a worker with room."""
        found = [self._alone(min(self._local))] if self._local else []
        if self._prefill and self._decode:
            found.append(self._pair(min(self._prefill), min(self._decode)))
        return min(found, key=lambda candidate: candidate.order, default=None)

    def candidates(self) -> list[Candidate]:
        """The candidates of the cheapest workers, cheapest first."""
        prefill, decode = nsmallest(MAX_WORKERS_COMPARED, self._prefill), nsmallest(MAX_WORKERS_COMPARED, self._decode)
        found = [self._pair(p, d) for p, d in product(prefill, decode)]
        found += [self._alone(term) for term in nsmallest(MAX_WORKERS_COMPARED, self._local)]
        return sorted(found, key=lambda candidate: candidate.order)

    # ---- costs

    def _uncached(self, cached_tokens: int) -> int:
        # The last prompt token is always computed: the first output token is drawn from its logits.
        return self._num_tokens - cached_tokens or 1

    def _compute_cost(self, worker: WorkerView, cached_tokens: int) -> float:
        return worker.num_queued_tokens + self._uncached(cached_tokens)

    def _local_cost(self, worker: WorkerView, cached_tokens: int) -> float:
        return self._compute_cost(worker, cached_tokens) + TOKENS_PER_DECODING_SEQUENCE * worker.num_sequences

    def _missing_blocks(self, cached_tokens: int) -> int:
        return self._num_blocks - cached_tokens // self._block_size

    def _decode_cost(self, worker: WorkerView, cached_tokens: int) -> float:
        moved = TOKENS_PER_MISSING_BLOCK * self._missing_blocks(cached_tokens)
        return moved + TOKENS_PER_DECODING_SEQUENCE * worker.num_sequences

    def _pair(self, prefill: _Term, decode: _Term) -> Candidate:
        prefill_cost, _, _, prefill_worker, prefill_cached = prefill
        decode_cost, _, _, decode_worker, decode_cached = decode
        return Candidate(
            prefill_worker=prefill_worker.worker_id,
            decode_worker=decode_worker.worker_id,
            cached_tokens=self._num_tokens - self._uncached(prefill_cached),
            uncached_tokens=self._uncached(prefill_cached),
            queued_tokens=prefill_worker.num_queued_tokens,
            decode_load=decode_worker.num_sequences,
            transfer_blocks=self._missing_blocks(decode_cached),
            cost=prefill_cost + decode_cost + TOKENS_PER_DISPATCH,
            num_dispatched=prefill_worker.num_dispatched + decode_worker.num_dispatched,
        )

    def _alone(self, decode: _Term) -> Candidate:
        cost, _, _, worker, cached_tokens = decode
        return Candidate(
            prefill_worker=None,
            decode_worker=worker.worker_id,
            cached_tokens=self._num_tokens - self._uncached(cached_tokens),
            uncached_tokens=self._uncached(cached_tokens),
            queued_tokens=worker.num_queued_tokens,
            decode_load=worker.num_sequences,
            transfer_blocks=0,
            cost=cost,
            num_dispatched=worker.num_dispatched,
        )


def reason_for(candidate: Candidate, has_prefill_workers: bool) -> str:
    """The sentence of `ExplainResponse.reason`."""
    if candidate.prefill_worker is not None:
        return f"lowest sum of queue, uncached prefill and transfer ({candidate.cost:.0f} tokens)"
    if not has_prefill_workers:
        return "no prefill worker serves: the decode worker computes the prompt"
    return f"only {candidate.uncached_tokens} uncached tokens: the decode worker computes the prompt"
