"""Drives a runner one step ahead, as a worker does: a thread collects a step while the next one is planned.

    this thread      plan, submit(k + 1) | complete(k)         | plan, submit(k + 2)
    engine thread    ---- collect(k) ----|---- collect(k + 1) ----

The KV of a sequence that is added with computed tokens is whatever the pool holds, in the place of a hand-off.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_sections.measure import finish
from benchmarks.gpu_sections.section import Section
from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from core.scheduling.sequence import Sequence as LiveSequence
from core.step import StepOutput, StepPlan
from engine.gpu import graphs
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits

MAX_OUTPUT = 4096
BIG_MODEL, TINY_MODEL = "random:llama-3.1-8b", "random:llama3-tiny"
NO_LIMIT_MS = 60_000.0
FIRST_NAN_CODE = 0x7F  # of e4m3; the codes below are the positive numbers


class StepTime(NamedTuple):
    seconds: float  # from the end of the step before
    device_seconds: float
    num_chunks: int


def build(section: Section, limits: StepLimits, **options: Any) -> GpuRunner:
    """The runner of a worker: an 8B model on the device, or in a rehearsal a tiny one on the CPU."""
    defaults: dict[str, Any] = {"model": BIG_MODEL, "dtype": "bfloat16", "device": "cuda:0"}
    if section.rehearse:
        defaults = {"model": TINY_MODEL, "dtype": "float32", "device": "cpu", "num_threads": 1}
        options["kv_memory_mb"] = 8
        graphs.MAX_ROWS = 0  # the kernels of each graph with prompts would be interpreted for half a minute
    else:
        gc.collect()  # an earlier runner is a cycle of objects
        torch.cuda.empty_cache()  # the pool takes what is free
    return GpuRunner(EngineConfig(**(defaults | options)), limits=limits)


def fill_with_noise(runner: GpuRunner) -> None:
    """Zeros are read and multiplied faster than real keys and values."""
    pool = runner._pool
    with torch.inference_mode():  # as the pool was allocated
        if pool.scales is None:
            pool.tensor.normal_()
        else:
            pool._bytes.random_(0, FIRST_NAN_CODE)
            pool.scales.fill_(0.01)
    finish(pool.tensor.device)


def request(name: str, prompt: Iterable[int], **sampling: Any) -> Request:
    token_ids = tuple(prompt)
    options: dict[str, Any] = {"max_tokens": MAX_OUTPUT, "temperature": 0.0, "ignore_eos": True}
    return Request(name, token_ids, len(token_ids), SamplingParams(**(options | sampling)))


class RunnerDriver:
    """`tokens`: the output of each sequence. `times`: of the steps of the last `run`."""

    def __init__(self, runner: GpuRunner, limits: StepLimits) -> None:
        self.runner = runner
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
        in_flight: deque[tuple[StepPlan, Future[StepOutput]]] = deque()
        ended_at = time.perf_counter()
        num_planned = 0
        while True:
            while len(in_flight) < MAX_STEPS_IN_FLIGHT and (num_steps is None or num_planned < num_steps):
                plan = self.scheduler.schedule()
                if plan is None:
                    break
                num_planned += 1
                self.runner.submit(plan)
                in_flight.append((plan, self._engine.submit(self.runner.collect)))
            if not in_flight:
                return self.tokens
            plan, future = in_flight.popleft()
            output = future.result()
            now = time.perf_counter()
            self.times.append(StepTime(now - ended_at, self.runner.device_seconds, len(plan.chunks)))
            ended_at = now
            self._complete(output)

    def _complete(self, output: StepOutput) -> None:
        assert not output.failed, output.failed
        for event in self.scheduler.complete_step(output):
            self.tokens[event.sequence_id].append(event.token.token_id)

    def clear(self) -> None:
        """End every sequence, and forget the prefix cache."""
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(sequence.sequence_id)
        self._begin()

    def _begin(self) -> None:
        self.pool = BlockPool(self.runner.num_blocks)
        eos_token_ids = self.runner.info.eos_token_ids
        self.scheduler = Scheduler(self._config, self.pool, self.runner.layout.block_size, eos_token_ids)


def random_prompt(length: int, vocab_size: int, seed: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
    return found
