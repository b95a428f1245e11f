"""The routing policy: the predicted seconds of every way that a request may take. The lowest sum wins.

For a pair (prefill worker P, decode worker D), and for D alone, which then computes the prompt itself:

    cost = queue_s         until the computing worker begins the prompt: the prompts that go first
         + prefill_s       to compute the uncached tokens; on D, in steps that its streams share
         + transfer_s      the part of the transfer that remains after the last chunk is computed; 0 for D alone
         + room_wait_s     until D has blocks, after the prompt is computed
         + gap_s x num_streams    what D's steps become longer, times the streams that feel it

Every term follows from what the workers report: the fitted time of their steps (`core/step_cost.py`), their prompts by
remaining work, their blocks, and the measured bandwidth of the path from P to D. Nothing is weighed. Among candidates
of nearly the same cost, the workers with the fewest requests of this router win.

A path belongs to a pair, so pairs are compared, but only those of the cheapest workers of each pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol

from core.config import RouterConfig
from core.lifecycle import RequestPath
from core.paths import PathStatus
from core.step_cost import StepCost, StepWork
from core.worker_load import size_class

MAX_PAIRED = 8  # of each role: the workers whose pairs are compared
NEAR_TIE_SHARE = 0.02
NEAR_TIE_S = 0.0005
MESSAGE_S = 0.002  # from the router to a worker and back
UNKNOWN_ROOM_WAIT_S = 1.0  # for a full decode worker that has released nothing yet
UNKNOWN_BYTES_PER_S = 1e9  # of a path that nobody has measured


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as the policy compares it for all requests. Calls that no report has yet are counted."""

    worker_id: str
    num_sequences: int
    num_dispatched: int  # requests of this router
    cost: StepCost
    step_limit_s: float = 0.0  # of a step with sequences in decode; 0 = no limit
    max_step_tokens: int = 512
    num_decoding: int = 0  # sequences in decode, and those that will be
    decode_context: int = 0  # their tokens
    backlog: tuple[float, ...] = ()  # seconds of prompt work, by size class
    num_free_blocks: int = 2**31  # available, less those promised to pulls
    blocks_released_per_s: float = 0.0
    block_bytes: int = 0
    agent_name: str = ""
    paths: Mapping[str, PathStatus] = field(default_factory=dict)  # over which the worker reads, by name of the owner

    def queue_s(self, own_work_s: float) -> float:
        """Seconds of prompt work that goes before a new prompt with this much work: all that is not longer."""
        return sum(self.backlog[: size_class(own_work_s) + 1])


Option = tuple[WorkerView, int]  # a worker with room, and the number of tokens of the prompt that it has cached


@dataclass(frozen=True, slots=True)
class RoutingQuestion:
    """A prompt and its possible workers. Those with room are options.

    `prefill_alive` is True if a prefill worker serves, with room or without, that has not failed the request.
    `block_size` is that of the decode workers.
    """

    num_tokens: int
    prefill: Sequence[Option]
    decode: Sequence[Option]
    prefill_alive: bool
    block_size: int

    def uncached(self, cached_tokens: int) -> int:
        # The last prompt token is always computed: the first output token is drawn from its logits.
        return self.num_tokens - cached_tokens or 1

    def missing_blocks(self, cached_tokens: int) -> int:
        return -(-self.num_tokens // self.block_size) - cached_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to serve a request, with its predicted times in seconds."""

    prefill_worker: str | None  # None: the decode worker computes the prompt
    decode_worker: str
    cached_tokens: int  # on the worker that computes the prompt
    uncached_tokens: int
    transfer_blocks: int
    num_dispatched: int  # requests of this router on the workers
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    room_wait_s: float = 0.0
    gap_s: float = 0.0
    num_streams: int = 0

    @property
    def path(self) -> RequestPath:
        return RequestPath.LOCAL if self.prefill_worker is None else RequestPath.DISAGGREGATED

    @property
    def first_token_s(self) -> float:
        """Predicted, from the dispatch on."""
        return self.queue_s + self.prefill_s + MESSAGE_S

    @property
    def cost(self) -> float:
        """Seconds."""
        ready_s = self.queue_s + self.prefill_s + self.transfer_s + self.room_wait_s
        return ready_s + self.gap_s * self.num_streams

    @property
    def order(self) -> tuple[float, int, str, str]:
        return self.cost, self.num_dispatched, self.prefill_worker or "", self.decode_worker


class Policy(Protocol):
    def choose(self, question: RoutingQuestion) -> Candidate | None:
        """None if the request has to wait for a worker with room."""

    def candidates(self, question: RoutingQuestion) -> list[Candidate]:
        """What `choose` compares; its choice comes first."""


class SecondsPolicy:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, question: RoutingQuestion) -> Candidate | None:
        found = self._all(question)
        return _spread(found) if found else None

    def candidates(self, question: RoutingQuestion) -> list[Candidate]:
        found = self._all(question)
        if not found:
            return []
        chosen = _spread(found)
        return [chosen, *sorted((c for c in found if c is not chosen), key=lambda candidate: candidate.order)]

    def _all(self, question: RoutingQuestion) -> list[Candidate]:
        decode = question.decode
        found: list[Candidate] = []
        if self._config.local_prefill == "auto" or not question.prefill_alive:
            found = [alone(question, worker, cached) for worker, cached in decode]
        if question.prefill and decode:
            computing = [(*_prompt_terms(question, *option), *option) for option in question.prefill]
            computing = nsmallest(MAX_PAIRED, computing, key=lambda terms: (terms[0] + terms[1], terms[2].worker_id))
            reading = decode
            if len(decode) > MAX_PAIRED:
                reading = nsmallest(MAX_PAIRED, decode, key=lambda option: _reading_cost(question, *option))
            found += [
                pair(question, p, p_cached, d, d_cached, queue_s, prefill_s)
                for queue_s, prefill_s, p, p_cached in computing
                for d, d_cached in reading
            ]
        return found


def pair(
    question: RoutingQuestion,
    prefill: WorkerView,
    prefill_cached: int,
    decode: WorkerView,
    decode_cached: int,
    queue_s: float,
    prefill_s: float,
) -> Candidate:
    missing, uncached = question.missing_blocks(decode_cached), question.uncached(prefill_cached)
    return Candidate(
        prefill_worker=prefill.worker_id,
        decode_worker=decode.worker_id,
        cached_tokens=question.num_tokens - uncached,
        uncached_tokens=uncached,
        transfer_blocks=missing,
        num_dispatched=prefill.num_dispatched + decode.num_dispatched,
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=_exposed_transfer_s(question, prefill, decode, missing, prefill_s),
        room_wait_s=_room_wait_s(decode, missing, queue_s + prefill_s),
        gap_s=_stream_s(question, decode),
        num_streams=decode.num_decoding,
    )


def alone(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> Candidate:
    """The decode worker computes the prompt, in steps that its streams share."""
    uncached = question.uncached(cached_tokens)
    cached_tokens = question.num_tokens - uncached
    work_s = worker.cost.prompt_seconds(uncached, cached_tokens)
    step_s = worker.cost.seconds(StepWork(worker.num_decoding, worker.decode_context, 0, 0.0))
    chunk = worker.max_step_tokens
    if worker.num_decoding and worker.step_limit_s:
        chunk = min(chunk, max(1, worker.cost.tokens_within(worker.step_limit_s - step_s, cached_tokens)))
    num_steps = -(-uncached // chunk)
    chunk_s = work_s / num_steps
    # Prompts that go first are computed in steps of the same length, so the streams stretch them alike.
    stretch = 1.0 + step_s / max(chunk_s, 1e-9) if num_steps > 1 else 1.0
    queue_s = worker.queue_s(work_s) * stretch
    prefill_s = work_s + num_steps * step_s
    return Candidate(
        prefill_worker=None,
        decode_worker=worker.worker_id,
        cached_tokens=cached_tokens,
        uncached_tokens=uncached,
        transfer_blocks=0,
        num_dispatched=worker.num_dispatched,
        queue_s=queue_s,
        prefill_s=prefill_s,
        room_wait_s=_room_wait_s(worker, question.missing_blocks(cached_tokens), 0.0),
        gap_s=chunk_s + _stream_s(question, worker),
        num_streams=worker.num_decoding,
    )


def _prompt_terms(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> tuple[float, float]:
    """Queue and prefill seconds on a prefill worker."""
    uncached = question.uncached(cached_tokens)
    work_s = worker.cost.prompt_seconds(uncached, question.num_tokens - uncached)
    return worker.queue_s(work_s), work_s + -(-uncached // worker.max_step_tokens) * worker.cost.step_s


def _reading_cost(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> tuple[float, int, str]:
    missing = question.missing_blocks(cached_tokens)
    moved_s = missing * worker.block_bytes / UNKNOWN_BYTES_PER_S
    cost = _room_wait_s(worker, missing, 0.0) + moved_s + _stream_s(question, worker) * worker.num_decoding
    return cost, worker.num_dispatched, worker.worker_id


def _stream_s(question: RoutingQuestion, worker: WorkerView) -> float:
    """What one more sequence in decode adds to each step."""
    return worker.cost.sequence_s + question.num_tokens * worker.cost.context_s


def _exposed_transfer_s(
    question: RoutingQuestion, prefill: WorkerView, decode: WorkerView, missing: int, prefill_s: float
) -> float:
    """Blocks move while the prompt is computed. What remains is the last chunk, or what a slow path lags behind."""
    if not missing:
        return 0.0
    path = decode.paths.get(prefill.agent_name)
    bytes_per_s = path.bytes_per_s or path.expected_bytes_per_s if path is not None else 0.0
    total_s = missing * decode.block_bytes / (bytes_per_s or UNKNOWN_BYTES_PER_S)
    last_blocks = min(missing, -(-prefill.max_step_tokens // question.block_size))
    return max(total_s - prefill_s, total_s * last_blocks / missing) + (0.0 if path is None else path.latency_s)


def _room_wait_s(worker: WorkerView, num_blocks: int, later_s: float) -> float:
    """Until `num_blocks` are free, counted from `later_s` on."""
    lacking = num_blocks - worker.num_free_blocks
    if lacking <= 0:
        return 0.0
    if worker.blocks_released_per_s <= 0.0:
        return UNKNOWN_ROOM_WAIT_S
    return max(0.0, lacking / worker.blocks_released_per_s - later_s)


def _spread(found: list[Candidate]) -> Candidate:
    """Of the candidates that cost about as little as the cheapest, the one with the fewest requests of this router."""
    most = min(candidate.cost for candidate in found) * (1.0 + NEAR_TIE_SHARE) + NEAR_TIE_S
    near = [candidate for candidate in found if candidate.cost <= most]
    return min(near, key=lambda candidate: (candidate.num_dispatched, *candidate.order))


def reason_for(candidate: Candidate, has_prefill_workers: bool) -> str:
    """The sentence of `ExplainResponse.reason`."""
    if candidate.prefill_worker is not None:
        return f"the lowest predicted cost ({candidate.cost:.3f} s), the first token in {candidate.first_token_s:.3f} s"
    if not has_prefill_workers:
        return "no prefill worker serves: the decode worker computes the prompt"
    return (
        f"the decode worker alone costs least ({candidate.cost:.3f} s), the first token in "
        f"{candidate.first_token_s:.3f} s"
    )
