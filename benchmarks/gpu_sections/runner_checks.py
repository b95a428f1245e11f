"""The runner as a whole: graphs beside single launches, a poisoned pool, and steps without a hidden synchronisation.

A float32 model of two layers computes each request alone and in a batch. A pool full of NaN must change no token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_sections.driver import TINY_MODEL, RunnerDriver, build, fill_with_nan, random_prompt, request
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits

LIMITS = StepLimits(max_running=16, max_batched_tokens=256)
LENGTHS, NUM_TOKENS = (1, 5, 16, 17, 60, 100, 31, 48, 200, 2), 24
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
CASE_S = 6.0

Tokens = dict[str, list[int]]


def run(section: Section) -> None:
    if not section.has_time_for(CASE_S if not section.rehearse else 0, "checks of the runner"):
        return
    options: dict[str, Any] = {"model": TINY_MODEL, "dtype": "float32", "kv_memory_mb": 64, "num_threads": 1}
    with section.case("checks of the runner"):
        runner = build(section, LIMITS, **options)
        expected = generate(runner)
        eager = build(section, LIMITS, with_graphs=False, **options)
        compare(section, "graphs beside single launches", generate(eager), expected)
        fill_with_nan(runner)
        compare(section, "a pool poisoned with NaN", generate(runner), expected)
        with errors_at_synchronisations(section):
            found = generate(runner)
        compare(section, "steps that may not synchronise", found, expected)
        runner.close()
        eager.close()


def generate(runner: GpuRunner) -> Tokens:
    driver = RunnerDriver(runner, LIMITS)
    for seed, length in enumerate(LENGTHS):
        prompt = random_prompt(length, runner.info.vocab_size, seed)
        sampling = SAMPLED if seed % 2 else {}
        driver.add(request(str(seed), prompt, max_tokens=NUM_TOKENS, seed=seed, **sampling))
    return dict(driver.run())


def compare(section: Section, measure: str, found: Tokens, expected: Tokens) -> None:
    differing = sum(a != b for name in expected for a, b in zip(found[name], expected[name], strict=True))
    total = sum(map(len, expected.values()))
    section.add(Line(f"{measure}: tokens that differ, of {total}", differing, "", most=0))


@contextlib.contextmanager
def errors_at_synchronisations(section: Section) -> Iterator[None]:
    """Raise an error where an operation waits for the device. Waiting for an event is allowed: `collect` does."""
    if section.rehearse:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
