"""Tandem's engine alone; benchmarks/engine/programs.py starts it and lists its commands.

    python -m benchmarks.engine.tandem_worker '{"model": ..., ...}'    options of EngineConfig

A decode step is what a decode worker does: schedule, build the batch, compute, sample, complete the step. The KV of
sequences in decode is noise, in the place of what a prefill worker would have sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.engine.programs import FIRST_WORD_ID, LAST_WORD_ID
from benchmarks.processes import obey, take_stdout
from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.step import TokenEvent
from engine.runner import run_step
from engine.torch_runner import TorchRunner
from model_files.model_source import load_config, resolve_model
from worker.core import WorkerCore

NEVER = float("inf")
MAX_OUTPUT = 1024
SCHEDULER = SchedulerConfig(512, 64, slo_itl_ms=60_000.0)  # a limit would keep prompts of a full batch apart
READ_BYTES = 1 << 29  # far more than any cache
MATRIX = 2048
FLOOR_TRIES = 5
MAX_FLOOR_S = 2.0  # torch multiplies bf16 very slowly on a CPU without AVX-512


class Worker:
    """Each public method is a command."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = TorchRunner(config)
        self._last_word_id = min(LAST_WORD_ID, load_config(resolve_model(config.model)).vocab_size - 1)
        self._random = random.Random(0)
        self._num_added = 0
        self._core = self._empty_core()

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        self._core = self._empty_core()
        self._fill_pool_with_noise()
        for _ in range(batch):
            sequence = self._core.admit(self._request(context + 1, MAX_OUTPUT), NEVER, 0.0)
            blocks = self._core.pool.allocate(-(-context // self._runner.layout.block_size))
            assert blocks is not None, "kv_memory_mb is too small for this batch"
            sequence.block_table += blocks
            sequence.num_computed_tokens = context
            self._core.scheduler.add(sequence)
        self._step()  # hashes the blocks of the prompts, which a worker does while it pulls them
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        for sequence in list(self._core.scheduler.running)[batch:]:
            self._core.scheduler.abort(sequence.sequence_id)
        return {}

    def steps(self, count: int) -> dict[str, list[float]]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._step()
            times.append((time.perf_counter() - start) * 1e3)
        return {"ms": times}

    def prefill(self, tokens: int) -> dict[str, float]:
        self.keep(0)
        sequence = self._core.admit(self._request(tokens, 1), NEVER, 0.0)
        start = time.perf_counter()
        self._core.scheduler.add(sequence)
        while not self._step():
            pass
        return {"ms": (time.perf_counter() - start) * 1e3}

    def floors(self) -> dict[str, float]:
        """The pool is touched first: a fresh page costs a prompt more time than its KV, and only once."""
        if (touching := self._runner._pool.touch_rest()) is not None:
            touching.join()
        layout = self._runner.layout
        return {
            "read_bytes_per_s": READ_BYTES / best_of(search_memory()),
            "flop_per_s": 2 * MATRIX**3 / best_of(multiply_matrices()),
            "kv_bytes_per_token": layout.block_bytes / layout.block_size,
        }

    # ---- inside

    def _empty_core(self) -> WorkerCore:
        pool = BlockPool(self._runner.num_blocks)
        scheduler = Scheduler(SCHEDULER, pool, self._runner.layout.block_size, frozenset())
        return WorkerCore(scheduler, pool, plans_ahead=False)

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        self._num_added += 1
        prompt = tuple(
            self._random.randint(min(FIRST_WORD_ID, self._last_word_id), self._last_word_id) for _ in range(num_tokens)
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(self._num_added), prompt, num_tokens, sampling)

    def _step(self) -> list[TokenEvent]:
        (action,) = self._core.next_step(0.0)
        return self._core.complete_step(run_step(self._runner, action.plan), 0.0)

    def _fill_pool_with_noise(self) -> None:
        memory = self._runner.pool_memory()
        assert memory is not None
        assert self._runner.layout.dtype == "bfloat16"
        noise = np.random.default_rng(0).normal(size=1 << 22).astype(np.float32)
        raw = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        for start in range(0, len(memory), len(raw)):
            end = min(start + len(raw), len(memory))
            memory[start:end] = raw[: end - start]


def best_of(work: Callable[[], Any]) -> float:
    """Seconds of the fastest try."""
    times: list[float] = []
    while len(times) < FLOOR_TRIES and sum(times) < MAX_FLOOR_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def search_memory() -> Callable[[], Any]:
    """The C library's search for a byte that is not there only reads."""
    memory = mmap.mmap(-1, READ_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.zero_()
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    return lambda: search(tensor.data_ptr(), 1, READ_BYTES)


def multiply_matrices() -> Callable[[], Any]:
    left, right = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.matmul(left, right)


if __name__ == "__main__":
    answers = take_stdout()
    obey(Worker(EngineConfig(**json.loads(sys.argv[1]))), answers)
