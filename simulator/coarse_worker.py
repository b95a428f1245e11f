"""A worker in virtual time whose state changes only when work comes or ends, so that a thousand fit into a simulation.

Streams share the steps: each gets a token in each step, of the time that the cost model gives. Prompts run one at a
time: a due one first, else the one with the least work (core/scheduling/prompt_order.py). With streams, prompts take
what the step limit leaves of a step; without, steps as large as the token budget.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from core.cost.step_cost import StepCost
from core.lifecycle import ServiceRole
from core.traffic import WorkerTraffic
from simulator.trace import TraceRequest
from simulator.world import World

TINY = 1e-6
# A prompt joins the second step after its arrival, and ends with its last step, which other prompts fill. In steps:
STEPS_AHEAD, FILLED = 1.5, 0.5
SLOWEST = 0.02  # share of a step for prompts, in predictions


@dataclass(frozen=True, slots=True)
class CoarseSpec:
    """Of every worker."""

    cost: StepCost
    step_limit_s: float  # of a step with streams and prompts
    max_step_tokens: int
    pool_tokens: dict[ServiceRole, int]


@dataclass(slots=True, eq=False)
class CoarseRequest:
    traced: TraceRequest
    number: int
    arrived_at: float
    decode: CoarseWorker | None = None  # where it streams
    tokens_left: float = 0.0
    cached_tokens: int = 0
    left_s: float = 0.0  # of the prompt, without the constant time of its steps
    stretch: float = 1.0  # with it
    due_s: float = 0.0  # in `left_s` that the worker has served
    delay_s: float = 0.0  # by steps that the prompt cannot join
    first_token_at: float = 0.0
    ended_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.traced.num_tokens + self.traced.num_output_tokens


@dataclass(slots=True, eq=False)
class CoarseWorker:
    """`prompt_done` and `stream_done` learn of ends."""

    worker_id: str
    role: ServiceRole
    world: World
    spec: CoarseSpec
    prompt_done: Callable[[CoarseWorker, CoarseRequest], None]
    stream_done: Callable[[CoarseRequest], None]
    draining: bool = False
    prompts: list[CoarseRequest] = field(default_factory=list)  # the first one is computed
    streams: list[tuple[float, int, CoarseRequest]] = field(default_factory=list)  # a heap: `_tokens` at the end
    waiting: list[CoarseRequest] = field(default_factory=list)  # streams without room
    held_tokens: int = 0  # of streams, with those to come
    num_promised: int = 0  # requests that will be streams
    promised_tokens: int = 0
    _tokens: float = 0.0
    _context: float = 0.0  # of all streams
    _since: float = 0.0
    _gap_s: float = 0.0
    _speed: float = 0.0  # of the first prompt
    _version: int = 0
    _served_s: float = 0.0  # of prompts
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)  # hash ids, the oldest first

    def cached_tokens(self, traced: TraceRequest) -> int:
        num_blocks = sum(1 for _ in takewhile(self._cache.__contains__, traced.hash_ids))
        return min(num_blocks * traced.tokens_per_hash_id, traced.num_tokens - 1)

    def prompt_s(self, traced: TraceRequest) -> tuple[float, float]:
        """Until this prompt would be computed, and its own part."""
        cached = self.cached_tokens(traced)
        own_s = self.spec.cost.prompt_seconds(traced.num_tokens - cached, cached)
        ahead_s = sum(min(one.left_s, own_s) for one in self.prompts)
        decode_s = self._decode_s()
        share = 1.0 if not self.streams else max(SLOWEST, 1.0 - decode_s / self.spec.step_limit_s)
        return (ahead_s + own_s) / share + decode_s + self._step_delay_s(own_s), own_s

    @property
    def num_sequences(self) -> int:
        return len(self.streams) + len(self.waiting) + self.num_promised

    def lacking(self, request: CoarseRequest) -> int:
        """Tokens of room."""
        room = self.spec.pool_tokens[self.role] - self.held_tokens - self.promised_tokens
        return max(0, request.num_tokens - room)

    def promise(self, request: CoarseRequest, times: int = 1) -> None:
        """Room for a stream to come; with -1 times, the stream has come."""
        self.num_promised += times
        self.promised_tokens += times * request.num_tokens

    def add_prompt(self, request: CoarseRequest) -> None:
        self._advance()
        cost, traced = self.spec.cost, request.traced
        request.cached_tokens = self.cached_tokens(traced)
        num_tokens = traced.num_tokens - request.cached_tokens
        request.left_s = cost.prompt_seconds(num_tokens, request.cached_tokens)
        request.stretch = 1.0 + cost.step_s * max(1.0, num_tokens / self.spec.max_step_tokens) / request.left_s
        request.delay_s = self._step_delay_s(request.left_s)
        request.due_s = self._served_s + 2.0 * (request.left_s + sum(one.left_s for one in self.prompts))
        self.prompts.append(request)
        self._changed()

    def add_stream(self, request: CoarseRequest) -> None:
        self._advance()
        self.waiting.append(request)
        self._admit()
        self._changed()

    def remember(self, traced: TraceRequest) -> None:
        for hash_id in traced.hash_ids:
            self._cache[hash_id] = None
            self._cache.move_to_end(hash_id)
        limit = (self.spec.pool_tokens[self.role] - self.held_tokens) // traced.tokens_per_hash_id
        while len(self._cache) > max(0, limit):
            self._cache.popitem(last=False)

    def take_streams(self) -> list[CoarseRequest]:
        """All of them leave, with what they lack."""
        self._advance()
        for end, _, request in self.streams:
            request.tokens_left = end - self._tokens
        taken = [*(request for _, _, request in self.streams), *self.waiting]
        self.streams, self.held_tokens, self._context = [], 0, 0.0
        self.waiting.clear()
        self._changed()
        return taken

    def traffic(self) -> WorkerTraffic:
        spec, backlog_s = self.spec, sum(one.left_s for one in self.prompts)
        num_waiting = len(self.prompts) + len(self.waiting)
        return WorkerTraffic(
            self.worker_id, self.role, spec.cost, spec.step_limit_s, spec.max_step_tokens, spec.pool_tokens[self.role],
            self.held_tokens, backlog_s, num_waiting,
        )  # fmt: skip

    # ---- time

    def _step_delay_s(self, own_s: float) -> float:
        """Until the first step that can take a new prompt: after the rest of the present step and the planned one."""
        if self.streams:
            return STEPS_AHEAD * self._gap_s
        if not self.prompts or self.prompts[0].left_s < own_s:
            return 0.0
        return min(sum(one.left_s for one in self.prompts), STEPS_AHEAD * self._full_step_s)

    @property
    def _full_step_s(self) -> float:
        cost = self.spec.cost
        return cost.step_s + cost.prompt_seconds(self.spec.max_step_tokens)

    def _decode_s(self) -> float:
        cost = self.spec.cost
        return cost.step_s + len(self.streams) * cost.sequence_s + self._context * cost.context_s

    def _advance(self) -> None:
        """To now, at the speeds since the last change."""
        passed_s, self._since = self.world.now - self._since, self.world.now
        if self.prompts:
            self.prompts[0].left_s -= passed_s * self._speed
            self._served_s += passed_s * self._speed
        if self.streams:
            tokens = passed_s / self._gap_s
            self._tokens += tokens
            self._context += tokens * len(self.streams)

    def _changed(self) -> None:
        """The speeds until the next end, which is planned."""
        decode_s = self._decode_s()
        ends_in_s: list[float] = []
        if self.prompts:
            self.prompts.sort(key=self._order)
            self._speed = 1.0 / self.prompts[0].stretch
            if self.streams:
                self._gap_s = max(self.spec.step_limit_s, 1.02 * decode_s)
                self._speed = 1.0 - decode_s / self._gap_s
            ends_in_s.append(max(0.0, self.prompts[0].left_s / self._speed))
        elif self.streams:
            self._gap_s = decode_s
        if self.streams:
            ends_in_s.append(max(0.0, (self.streams[0][0] - self._tokens) * self._gap_s))
        self._version += 1
        if ends_in_s:
            self.world.after(min(ends_in_s), partial(self._end, self._version))

    def _order(self, prompt: CoarseRequest) -> tuple[bool, float, int]:
        """As core/scheduling/prompt_order.py: a due prompt first, else the least work."""
        is_due = prompt.due_s - prompt.left_s <= self._served_s
        return (not is_due, prompt.due_s if is_due else prompt.left_s, prompt.number)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        done = self.prompts.pop(0) if self.prompts and self.prompts[0].left_s <= TINY else None
        while self.streams and self.streams[0][0] <= self._tokens + TINY:
            _, _, request = heapq.heappop(self.streams)
            self._context -= request.num_tokens
            self.held_tokens -= request.num_tokens
            self.stream_done(request)
        self._admit()
        self._changed()
        if done is not None:
            if not self.streams:  # other prompts fill its last step
                done.delay_s += min(sum(one.left_s for one in self.prompts), FILLED * self._full_step_s)
            self.remember(done.traced)
            self.prompt_done(self, done)

    def _admit(self) -> None:
        for request in sorted(self.waiting, key=lambda one: one.number):
            if self.held_tokens + request.num_tokens <= self.spec.pool_tokens[self.role]:
                self.waiting.remove(request)
                self.remember(request.traced)
                self.held_tokens += request.num_tokens
                self._context += request.num_tokens - request.tokens_left
                heapq.heappush(self.streams, (self._tokens + request.tokens_left, request.number, request))
