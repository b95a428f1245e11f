"""Coarse workers in virtual time: whole stretches of decode steps at once, some thousand requests in a second.

One class plays every role. The jobs of a prefill worker end with their first token, those of a decode worker come with
a computed prompt, and an undivided worker has whole jobs. A step follows the rule of vLLM: a token of every decoding
job, then prompts in order of arrival, in chunks, until the token budget is spent. A job is admitted when its prompt and
its whole output fit into the KV pool, so nothing is preempted. A job that no pool can hold never gets a token.

    arrival -> undivided worker ----------------------------------------> last token
    arrival -> prefill worker -> first token -> link -> decode worker --> last token

What is left out: the prefix cache of each worker (a job says what is cached), and queues in the router.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from core.cost.step_cost import StepCost

MAX_RUNNING = 256  # sequences of a worker, as vLLM's max_num_seqs


@dataclass(frozen=True, slots=True)
class Job:
    """The lengths of a request. At least one token of the prompt is not cached."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_cached_tokens < self.num_prompt_tokens or self.num_output_tokens < 1:
            raise ValueError(f"not the lengths of a request: {self}")


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A worker: `width` GPUs that share one copy of the model.

    `overlap`: the share of the time for reading the weights that a step hides behind the compute of prompts. The public
    points of `simulator/calibration/public_points.py` fit best with 0, the sum of both, as the schedulers have it; a
    roofline has 1. KV reads are never hidden: attention is a kernel of its own.
    """

    width: int
    cost: StepCost
    max_step_tokens: int
    pool_tokens: int
    overlap: float


@dataclass(slots=True)
class PlacedJob:
    """A job in a worker. Times are absolute seconds."""

    job: Job
    arrived_at: float
    ready_at: float  # not before this its worker may take it
    prompt_left: int
    num_computed: int
    steps_left: int  # tokens after the prompt's last step
    first_token_at: float = 0.0
    last_token_at: float = 0.0


Gap = tuple[float, int]  # seconds between two tokens of a job, and how many such gaps


class Worker:
    def __init__(self, kind: WorkerKind) -> None:
        self.kind = kind
        self.now = 0.0  # end of the last step
        self.busy_s = self.prompt_s = 0.0
        self.most_reserved = 0  # tokens
        self.num_passes = 0  # of steps that were computed at once
        self.link_free_at = 0.0
        self.finished: list[PlacedJob] = []
        self.gaps: list[Gap] = []
        self._waiting: deque[PlacedJob] = deque()
        self._prefilling: deque[PlacedJob] = deque()
        self._decoding: list[tuple[int, int, PlacedJob]] = []  # heap by the step of the last token
        self._num_steps = self._num_added = 0
        self._context = 0  # tokens of all decoding jobs
        self._reserved = 0
        self._prompt_work_s = 0.0  # of prompts that wait or are being computed
        self.num_known_tokens = 0  # prompt tokens of every job here: what a router spreads over decode workers

    def load_s(self, at: float) -> float:
        """Seconds of work that a new job finds, with the rest of the step in flight: what the router compares."""
        waits_s = max(0.0, self.now - at) + self._prompt_work_s
        return waits_s + self.num_known_tokens * self.kind.cost.context_s + len(self._decoding) * 1e-9

    def add(self, placed: PlacedJob) -> None:
        if not (self._waiting or self._prefilling or self._decoding):
            self.now = max(self.now, placed.ready_at)
        self._waiting.append(placed)
        self.num_known_tokens += placed.job.num_prompt_tokens
        self._prompt_work_s += self.kind.cost.prompt_seconds(placed.prompt_left, placed.num_computed)

    def advance(self, until: float) -> None:
        """Every step that begins before `until`."""
        while self.now < until:
            self._admit()
            if self._prefilling:
                self._mixed_step()
            elif self._decoding:
                self._decode_steps(until)
            elif self._waiting:
                self.now = max(self.now, self._waiting[0].ready_at)
            else:
                return

    def _admit(self) -> None:
        while self._waiting and self._waiting[0].ready_at <= self.now:
            if len(self._prefilling) + len(self._decoding) >= MAX_RUNNING:
                return
            placed = self._waiting[0]
            wanted = placed.job.num_prompt_tokens + placed.steps_left
            if self._reserved + wanted > self.kind.pool_tokens:
                return
            self._waiting.popleft()
            self._reserved += wanted
            self.most_reserved = max(self.most_reserved, self._reserved)
            if placed.prompt_left:
                self._prefilling.append(placed)
            else:
                self._begin_decoding(placed)

    def _begin_decoding(self, placed: PlacedJob) -> None:
        self._num_added += 1
        self._context += placed.job.num_prompt_tokens
        heappush(self._decoding, (self._num_steps + placed.steps_left, self._num_added, placed))

    def _mixed_step(self) -> None:
        cost, num_decodes = self.kind.cost, len(self._decoding)
        budget = max(1, self.kind.max_step_tokens - num_decodes)
        prompt_s, done = 0.0, []
        for placed in self._prefilling:
            if not budget:
                break
            length = min(budget, placed.prompt_left)
            prompt_s += cost.prompt_seconds(length, placed.num_computed)
            budget -= length
            placed.prompt_left -= length
            placed.num_computed += length
            if not placed.prompt_left:
                done.append(placed)
        self._prompt_work_s -= prompt_s
        self.prompt_s += prompt_s
        reads_s = num_decodes * cost.sequence_s + self._context * cost.context_s
        self._pass(cost.step_s + prompt_s + reads_s - self.kind.overlap * min(cost.step_s, prompt_s), 1)
        if len(done) == len(self._prefilling) and not self._waiting:
            self._prompt_work_s = 0.0  # without what rounding left
        for placed in done:
            self._prefilling.popleft()
            placed.first_token_at = self.now
            if placed.steps_left:
                self._begin_decoding(placed)
            else:
                self._end(placed)

    def _decode_steps(self, until: float) -> None:
        """As many steps as pass before a job ends, or another one may come."""
        cost, num_decodes = self.kind.cost, len(self._decoding)
        if self._waiting:
            ready_at = self._waiting[0].ready_at
            until = min(until, ready_at) if ready_at > self.now else until
        first_s = cost.step_s + num_decodes * cost.sequence_s + self._context * cost.context_s
        growth_s = num_decodes * cost.context_s  # of each step over the one before it
        num_steps = self._decoding[0][0] - self._num_steps
        if until < math.inf:
            # growth / 2 x k^2 + (first - growth / 2) x k = left, in the form that stays exact for a small growth
            left, linear = until - self.now, first_s - growth_s / 2
            within = 2.0 * left / (linear + (linear * linear + 2.0 * growth_s * left) ** 0.5)
            num_steps = min(num_steps, int(within) + 1)
        self._pass(first_s * num_steps + growth_s * num_steps * (num_steps - 1) / 2, num_steps)

    def _pass(self, seconds: float, num_steps: int) -> None:
        """Every decoding job gets a token in each of these steps."""
        num_decodes = len(self._decoding)
        self.num_passes += 1
        self.now += seconds
        self.busy_s += seconds
        self._num_steps += num_steps
        self._context += num_decodes * num_steps
        if num_decodes:
            self.gaps.append((seconds / num_steps, num_decodes * num_steps))
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            placed = heappop(self._decoding)[2]
            self._context -= placed.job.num_prompt_tokens + placed.steps_left
            self._end(placed)

    def _end(self, placed: PlacedJob) -> None:
        placed.last_token_at = self.now
        self._reserved -= placed.job.num_prompt_tokens + placed.steps_left
        self.num_known_tokens -= placed.job.num_prompt_tokens
        self.finished.append(placed)


@dataclass(frozen=True, slots=True)
class Served:
    arrived_at: float
    ended_at: float
    num_output_tokens: int
    ttft_s: float
    tpot_s: float | None  # None with one output token

    def within(self, slo_ttft_s: float, slo_tpot_s: float) -> bool:
        return self.ttft_s <= slo_ttft_s and (self.tpot_s is None or self.tpot_s <= slo_tpot_s)


@dataclass(frozen=True, slots=True)
class Handoff:
    """The way of a prompt's KV to its decode worker; prompts of one reader follow each other."""

    bytes_per_s: float  # into a decode worker of one GPU
    latency_s: float
    token_bytes: int


@dataclass
class Fleet:
    """Requests are added by rising time. Each goes to the worker with the least work.

    Without a decode worker the fleet is undivided: `first` are its workers.
    """

    first: Sequence[Worker]
    decode: Sequence[Worker]
    handoff: Handoff
    outside_s: float = 0.0  # of every TTFT, outside the workers
    served: list[Served] = field(default_factory=list)
    _computed: list[tuple[float, int, PlacedJob]] = field(default_factory=list)  # heap of prompts to hand off
    _num_computed: int = 0

    def add(self, job: Job, now: float) -> None:
        self.advance(now)
        if not self._has_room(job):
            self.served.append(Served(now, now, job.num_output_tokens, math.inf, None))
            return
        steps = 0 if self.decode else job.num_output_tokens - 1
        new_tokens = job.num_prompt_tokens - job.num_cached_tokens
        placed = PlacedJob(job, now, now, new_tokens, job.num_cached_tokens, steps)
        min(self.first, key=lambda worker: worker.load_s(now)).add(placed)

    def _has_room(self, job: Job) -> bool:
        """Whether a pool can hold the job at all. A prompt with one token of output ends in the first pool."""
        whole = job.num_prompt_tokens + job.num_output_tokens - 1
        if self.decode and job.num_output_tokens > 1:
            return job.num_prompt_tokens <= self.first[0].kind.pool_tokens and whole <= self.decode[0].kind.pool_tokens
        return whole <= self.first[0].kind.pool_tokens

    def advance(self, until: float) -> None:
        ended = _advanced(self.first, until)
        if not self.decode:
            self._serve(ended)
            return
        for placed in ended:
            self._num_computed += 1
            heappush(self._computed, (placed.first_token_at, self._num_computed, placed))
        while self._computed and self._computed[0][0] <= until:
            self._hand_off(heappop(self._computed)[2])
        self._serve(_advanced(self.decode, until))

    def _hand_off(self, placed: PlacedJob) -> None:
        if placed.job.num_output_tokens == 1:
            self._serve([placed])
            return
        now = placed.first_token_at
        self._serve(_advanced(self.decode, now))
        reader = min(self.decode, key=lambda worker: worker.num_known_tokens)
        size = placed.job.num_prompt_tokens * self.handoff.token_bytes
        read_s = self.handoff.latency_s + size / (self.handoff.bytes_per_s * reader.kind.width)
        reader.link_free_at = max(now, reader.link_free_at) + read_s
        placed.ready_at, placed.steps_left = reader.link_free_at, placed.job.num_output_tokens - 1
        reader.add(placed)

    def _serve(self, ended: Iterable[PlacedJob]) -> None:
        for placed in ended:
            num_tokens, first_at, last_at = placed.job.num_output_tokens, placed.first_token_at, placed.last_token_at
            tpot_s = (last_at - first_at) / (num_tokens - 1) if num_tokens > 1 else None
            ttft_s = first_at - placed.arrived_at + self.outside_s
            self.served.append(Served(placed.arrived_at, last_at, num_tokens, ttft_s, tpot_s))

    def run(self, jobs: Iterable[Job], times: Iterable[float]) -> list[Served]:
        """All of them, by time of arrival."""
        for job, at in zip(jobs, times, strict=True):
            self.add(job, at)
        self.advance(math.inf)
        self.served.sort(key=attrgetter("arrived_at"))
        return self.served


def _advanced(workers: Sequence[Worker], until: float) -> list[PlacedJob]:
    """The jobs that ended meanwhile."""
    ended: list[PlacedJob] = []
    for worker in workers:
        if worker.now < until:
            worker.advance(until)
        if worker.finished:
            ended += worker.finished
            worker.finished.clear()
    return ended
