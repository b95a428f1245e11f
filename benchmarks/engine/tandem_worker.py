"""Tandem's engine alone; benchmarks/engine/programs.py starts it and lists its commands.

    python -m benchmarks.engine.tandem_worker '{"model": ..., ...}'    options of EngineConfig

A decode step is schedule, build the batch, compute, sample, complete the step (benchmarks/runner_driver.py). The KV of
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

import torch

from benchmarks.engine.programs import FIRST_WORD_ID, LAST_WORD_ID
from benchmarks.runner_driver import RunnerDriver, fill_with_noise, request
from core.config import EngineConfig
from engine.runner import StepLimits
from engine.torch_runner import TorchRunner
from model_files.model_source import load_config, resolve_model
from tests.support.child_processes import obey, take_stdout

LIMITS = StepLimits(max_running=64, max_batched_tokens=512)
READ_BYTES = 1 << 29  # far more than any cache
MATRIX = 2048
FLOOR_TRIES = 5
MAX_FLOOR_S = 2.0  # torch multiplies bf16 very slowly on a CPU without AVX-512


class Worker:
    """Each public method is a command."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = TorchRunner(config)
        self._driver = RunnerDriver(self._runner, LIMITS, max_in_flight=1)
        self._last_word_id = min(LAST_WORD_ID, load_config(resolve_model(config.model)).vocab_size - 1)
        self._random = random.Random(0)
        self._num_added = 0

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        self._driver.clear()
        fill_with_noise(self._runner)
        for _ in range(batch):
            self._add(context + 1, num_computed_tokens=context)
        self._driver.run(1)  # hashes the blocks of the prompts, which a worker does while it pulls them
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        self._driver.keep(batch)
        return {}

    def steps(self, count: int) -> dict[str, list[float]]:
        self._driver.run(count)
        return {"ms": [step.seconds * 1e3 for step in self._driver.times]}

    def prefill(self, tokens: int) -> dict[str, float]:
        self._driver.clear()
        start = time.perf_counter()
        self._add(tokens, max_tokens=1)
        self._driver.run()
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

    def _add(self, num_tokens: int, num_computed_tokens: int = 0, **sampling: Any) -> None:
        self._num_added += 1
        ids = range(min(FIRST_WORD_ID, self._last_word_id), self._last_word_id + 1)
        prompt = self._random.choices(ids, k=num_tokens)
        self._driver.add(request(str(self._num_added), prompt, **sampling), num_computed_tokens)


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
