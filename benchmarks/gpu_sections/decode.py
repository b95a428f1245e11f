"""Decode steps of an 8B model with random weights, beside the time in which the device reads weights and KV once.

The device step lies between the first and the last launch of a step, without the step's upload. The served step is the
time from one token of a sequence to its next: planning, preparing, computing, sampling and completing, one step ahead.
A step with drafts is prepared when the step before has ended. All its guesses are wrong, so its time is their price.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_sections.section import Section, build, copy_rate, finish
from benchmarks.report import Line
from benchmarks.runner_driver import MAX_OUTPUT, RunnerDriver, fill_with_noise, random_prompt, request
from core.cost.step_cost import StepWork
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits, run_step

CASES = [(1, 2048), (32, 2048), (1, 8192), (32, 8192), (128, 2048), (128, 8192)]  # (batch, context)
TINY_CASES = [(1, 20), (3, 40), (3, 10_000_000)]
STEPS, WARM_UP_STEPS = 40, 8
TINY_STEPS, TINY_WARM_UP_STEPS = 2, 1  # an interpreted step takes a third of a second
LEAST_SHARES = (0.8, 0.7)  # of the floor: on the device, served
NO_GOALS = (None, None)
CASE_S, MODEL_S = 10.0, 30.0
EIGHT_BITS: dict[str, dict[str, Any]] = {"fp8 weights": {"quantization": "fp8"}, "fp8 KV": {"kv_dtype": "fp8"}}
NUM_EIGHT_BIT_CASES = 4
DRAFTED = [(1, 0), (1, 1), (1, 3), (1, 7), (1, 15), (8, 0), (8, 3)]  # (sequences, drafts of each)

Case = tuple[int, int, dict[str, float]]  # (batch, context, sampling)

NO_SAMPLING: dict[str, float] = {}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def run(section: Section) -> None:
    cases, tiny = TINY_CASES if section.rehearse else CASES, section.rehearse
    copied = copy_rate(section.device, 1 << 16 if tiny else 1 << 31)
    section.note(f"copies on the device move {copied / 1e12:.3g} TB/s")
    wanted = [(batch, context, NO_SAMPLING) for batch, context in cases] + [(*cases[1], SAMPLED)]
    plain_ms: dict[str, float] = {}
    measure_model(section, "", wanted, copied, plain_ms)
    for what in EIGHT_BITS:
        if section.has_time_for(MODEL_S, what):
            measure_model(section, what, wanted[: 1 if tiny else NUM_EIGHT_BIT_CASES], copied, plain_ms)


def measure_model(
    section: Section, what: str, wanted: Sequence[Case], bytes_per_s: float, plain_ms: dict[str, float]
) -> None:
    """`what`: one of EIGHT_BITS, beside `plain_ms` by case; empty = bfloat16, which fills `plain_ms`."""
    limits = StepLimits(max_running=max(batch for batch, _, _ in wanted), max_batched_tokens=2048)
    runner = build(section, limits, **EIGHT_BITS.get(what, {}))
    section.note(f"{runner.num_blocks:,} KV blocks{f' with {what}' if what else ''}")
    fill_with_noise(runner)
    finish(section.device)
    driver = RunnerDriver(runner, limits)
    for case in wanted:
        batch, context, sampling = case
        name = f"{batch} x {context:,} tokens{', sampled' if sampling else ''}"
        words = f"{name}, {what}" if what else name
        with section.section(words):
            if (found := steps_of(section, driver, words, case)) is None:
                continue
            floor_ms = memory_bytes(runner, case) / bytes_per_s * 1e3
            shares, peer = (NO_GOALS, plain_ms.get(name)) if what else (LEAST_SHARES, None)
            if not what:
                plain_ms[name] = found[0]
            section.add(Line(f"{words}: step on the device", found[0], "ms", "bfloat16" if peer else "", peer,
                             floor_ms, least_share=shares[0]))  # fmt: skip
            section.add(Line(f"{words}: served step", found[1], "ms", floor=floor_ms, least_share=shares[1]))
    if not what:
        with section.section("drafts"):
            for batch, num_drafts in DRAFTED[:2] if section.rehearse else DRAFTED:
                measure_drafts(section, driver, wanted[0][1], batch, num_drafts)
    runner.close()


def measure_drafts(section: Section, driver: RunnerDriver, context: int, batch: int, num_drafts: int) -> None:
    """The same step again and again: its slots are written anew."""
    driver.clear()
    guesses, chunks = tuple(random_prompt(num_drafts, driver.runner.info.vocab_size, 1)), []
    for number in range(batch):
        tokens = random_prompt(context + 1, driver.runner.info.vocab_size, number)
        blocks = driver.pool.allocate(driver.runner.layout.num_blocks_for(context + 1 + num_drafts))
        assert blocks is not None, "the pool is too small"
        sampling = SamplingParams(max_tokens=MAX_OUTPUT, temperature=0.0)
        view = SequenceView(f"drafted {number}", tokens, len(tokens), blocks, sampling)
        chunks.append(ScheduledChunk(view, context, 1, samples=True, promised=False, drafts=guesses))
    on_device, served = [], []
    for step in range(TINY_STEPS if section.rehearse else STEPS):
        begun = time.perf_counter()
        output = run_step(driver.runner, StepPlan(step, tuple(chunks)))
        served.append(time.perf_counter() - begun)
        on_device.append(driver.runner.device_seconds)
        assert not output.failed, output.failed
    name = f"{batch} x {context:,} tokens, {num_drafts} drafts each"
    section.add(Line(f"{name}: step on the device", statistics.median(on_device) * 1e3, "ms"))
    section.add(Line(f"{name}: step, alone", statistics.median(served) * 1e3, "ms"))


def steps_of(section: Section, driver: RunnerDriver, name: str, case: Case) -> tuple[float, float] | None:
    """Milliseconds of a step on the device, and of a served one. None where the case does not fit."""
    (batch, context, sampling), runner = case, driver.runner
    steps, warm_up_steps = (TINY_STEPS, TINY_WARM_UP_STEPS) if section.rehearse else (STEPS, WARM_UP_STEPS)
    needed = batch * runner.layout.num_blocks_for(context + warm_up_steps + steps + 2)
    if needed > runner.num_blocks:
        section.note(f"{name}: needs {needed:,} KV blocks and does not fit")
        return None
    if not section.has_time_for(CASE_S, name):
        return None
    driver.clear()
    for number in range(batch):
        prompt = random_prompt(context + 1, runner.info.vocab_size, number)
        driver.add(request(f"{name} {number}", prompt, seed=number, **sampling), context)
    driver.run(warm_up_steps)  # the first step also hashes the blocks of the prompts
    driver.run(steps)
    measured = [step for step in driver.times[1:] if step.num_chunks == batch]
    on_device = statistics.median(step.device_seconds for step in measured) * 1e3
    return on_device, statistics.median(step.seconds for step in measured) * 1e3


def memory_bytes(runner: GpuRunner, case: Case) -> float:
    """That the step in the middle of the measured ones reads and writes. fp8 weights count one byte, the head's too."""
    batch, context, _ = case
    assert runner.sizes is not None
    length = context + WARM_UP_STEPS + STEPS // 2
    return runner.sizes.memory_bytes(StepWork(batch, batch * length, prefill_tokens=0, attended_pairs=0))
