"""Drives a runner one step ahead, as a worker does: a thread collects a step while the next one is planned.

    this thread      plan, submit(k + 1) | complete(k)         | plan, submit(k + 2)
    engine thread    ---- collect(k) ----|---- collect(k + 1) ----

With one step in flight, a step is planned when the one before is complete. The KV of a sequence that is added with
computed tokens is whatever the pool holds, in the place of a hand-off.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from core.config import SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from core.scheduling.sequence import Sequence as LiveSequence
from core.step import StepOutput, StepPlan
from engine.runner import StepLimits

MAX_OUTPUT = 4096
NO_LIMIT_MS = 60_000.0
NOISE_BLOCKS = 64
FIRST_NAN_CODE = 0x7F  # of e4m3; the codes below are the positive numbers


class StepTime(NamedTuple):
    seconds: float  # from the end of the step before
    device_seconds: float
    num_chunks: int


def request(name: str, prompt: Iterable[int], **sampling: Any) -> Request:
    token_ids = tuple(prompt)
    options: dict[str, Any] = {"max_tokens": MAX_OUTPUT, "temperature": 0.0, "ignore_eos": True}
    return Request(name, token_ids, len(token_ids), SamplingParams(**(options | sampling)))


class RunnerDriver:
    """`tokens`: the output of each sequence. `times`: of the steps of the last `run`."""

    def __init__(self, runner: Any, limits: StepLimits, max_in_flight: int = MAX_STEPS_IN_FLIGHT) -> None:
        self.runner = runner
        self._max_in_flight = max_in_flight
        self._config = SchedulerConfig(limits.max_batched_tokens, limits.max_running, 4096, slo_itl_ms=NO_LIMIT_MS)
        self._begin()
        self.tokens: dict[str, list[int]] = {}
        self.times: list[StepTime] = []
        self._engine = ThreadPoolExecutor(1, "engine")
        self._num_added = 0

    def add(self, wanted: Request, num_computed_tokens: int = 0) -> LiveSequence:
        sequence = LiveSequence(wanted, self._num_added)
        self._num_added += 1
        if num_computed_tokens:
            blocks = self.pool.allocate(self.runner.layout.num_blocks_for(num_computed_tokens))
            assert blocks is not None, "the pool is too small"
            sequence.block_table += blocks
            sequence.num_computed_tokens = num_computed_tokens
        self.tokens[sequence.sequence_id] = []
        self.scheduler.add(sequence)
        return sequence

    def run(self, num_steps: int | None = None) -> dict[str, list[int]]:
        """Run `num_steps`, or until no sequence is left. Returns `tokens`."""
        self.times = []
        in_flight: deque[tuple[StepPlan, Callable[[], StepOutput]]] = deque()
        ended_at = time.perf_counter()
        num_planned = 0
        while True:
            while len(in_flight) < self._max_in_flight and (num_steps is None or num_planned < num_steps):
                plan = self.scheduler.schedule()
                if plan is None:
                    break
                num_planned += 1
                self.runner.submit(plan)
                alone = self._max_in_flight == 1
                collect = self.runner.collect if alone else self._engine.submit(self.runner.collect).result
                in_flight.append((plan, collect))
            if not in_flight:
                return self.tokens
            plan, collect = in_flight.popleft()
            output = collect()
            now = time.perf_counter()
            device_s = getattr(self.runner, "device_seconds", 0.0)
            self.times.append(StepTime(now - ended_at, device_s, len(plan.chunks)))
            ended_at = now
            assert not output.failed, output.failed
            for event in self.scheduler.complete_step(output):
                self.tokens[event.sequence_id].append(event.token.token_id)

    def clear(self) -> None:
        """End every sequence, and forget the prefix cache."""
        self.keep(0)
        self._begin()

    def keep(self, count: int) -> None:
        """End all sequences but the first ones."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting][count:]:
            self.scheduler.abort(sequence.sequence_id)

    def _begin(self) -> None:
        self.pool = BlockPool(self.runner.num_blocks)
        eos_token_ids = self.runner.info.eos_token_ids
        self.scheduler = Scheduler(self._config, self.pool, self.runner.layout.block_size, eos_token_ids)


def fill_with_noise(runner: Any) -> None:
    """Zeros are read and multiplied faster than real keys and values."""
    pool = runner._pool
    with torch.inference_mode():  # as the pool was allocated
        if pool.scales is not None:
            pool._bytes.random_(0, FIRST_NAN_CODE)
            pool.scales.fill_(0.01)
        else:
            noise = torch.randn_like(pool.tensor[:NOISE_BLOCKS])
            for blocks in pool.tensor.split(NOISE_BLOCKS):
                blocks.copy_(noise[: len(blocks)])


def random_prompt(length: int, vocab_size: int, seed: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
    return found
