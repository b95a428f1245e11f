"""Decode steps of an 8B model with random weights, beside the time in which the device reads weights and KV once.

The device step lies between the first and the last launch of a step, without the step's upload. The served step is the
time from one token of a sequence to its next: planning, preparing, computing, sampling and completing, one step ahead.
A step with drafts is prepared when the step before has ended. All its guesses are wrong, so its time is their price.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.gpu_sections.driver import MAX_OUTPUT, RunnerDriver, build, fill_with_noise, random_prompt, request
from benchmarks.gpu_sections.measure import copy_rate
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from core.cost.step_cost import StepWork
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.runner import StepLimits, run_step

CASES = [(1, 2048), (32, 2048), (1, 8192), (32, 8192), (128, 2048), (128, 8192)]  # (batch, context)
TINY_CASES = [(1, 20), (3, 40), (3, 10_000_000)]
STEPS, WARM_UP_STEPS = 40, 8
TINY_STEPS, TINY_WARM_UP_STEPS = 4, 2  # an interpreted step takes a third of a second
LEAST_SHARES = (0.8, 0.7)  # of the floor: on the device, served
CASE_S, FP8_S = 10.0, 30.0
DRAFTED = [(1, 0), (1, 1), (1, 3), (1, 7), (1, 15), (8, 0), (8, 3)]  # (sequences, drafts of each)

Case = tuple[int, int, dict[str, float]]  # (batch, context, sampling)

NO_SAMPLING: dict[str, float] = {}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def run(section: Section) -> None:
    cases, tiny = TINY_CASES if section.rehearse else CASES, section.rehearse
    copied = copy_rate(section.device, 1 << 16 if tiny else 1 << 31)
    section.note(f"copies on the device move {copied / 1e12:.3g} TB/s")
    wanted = [(batch, context, NO_SAMPLING) for batch, context in cases] + [(*cases[1], SAMPLED)]
    measure_model(section, wanted, copied, "none")
    if section.has_time_for(FP8_S, "fp8 weights"):
        measure_model(section, [(*case, NO_SAMPLING) for case in cases[:2]], copied, "fp8")


def measure_model(section: Section, wanted: Sequence[Case], bytes_per_s: float, quantization: str) -> None:
    limits = StepLimits(max_running=max(batch for batch, _, _ in wanted), max_batched_tokens=2048)
    runner, quantized = build(section, limits, quantization=quantization), quantization != "none"
    section.note(f"{runner.num_blocks:,} KV blocks{' beside fp8 weights' if quantized else ''}")
    fill_with_noise(runner)
    driver = RunnerDriver(runner, limits)
    for batch, context, sampling in wanted:
        name = f"{batch} x {context:,} tokens{', sampled' if sampling else ''}{', fp8 weights' if quantized else ''}"
        with section.case(name):
            measure_case(section, driver, name, (batch, context, sampling), bytes_per_s, quantized)
    if not quantized:
        with section.case("drafts"):
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


def measure_case(
    section: Section, driver: RunnerDriver, name: str, case: Case, bytes_per_s: float, quantized: bool
) -> None:
    """Goals are for plain weights. The floor of fp8 weights counts one byte for each weight, the head's too."""
    (batch, context, sampling), runner = case, driver.runner
    steps, warm_up_steps = (TINY_STEPS, TINY_WARM_UP_STEPS) if section.rehearse else (STEPS, WARM_UP_STEPS)
    needed = batch * runner.layout.num_blocks_for(context + warm_up_steps + steps + 2)
    if needed > runner.num_blocks:
        section.note(f"{name}: needs {needed:,} KV blocks and does not fit")
        return
    if not section.has_time_for(CASE_S, name):
        return
    driver.clear()
    for number in range(batch):
        prompt = random_prompt(context + 1, runner.info.vocab_size, number)
        driver.add(request(f"{name} {number}", prompt, seed=number, **sampling), context)
    driver.run(warm_up_steps)  # the first step also hashes the blocks of the prompts
    driver.run(steps)
    measured = [step for step in driver.times[1:] if step.num_chunks == batch]
    assert runner.sizes is not None
    length = context + warm_up_steps + steps // 2
    work = StepWork(num_decodes=batch, decode_context=batch * length, prefill_tokens=0, attended_pairs=0)
    floor_ms = runner.sizes.memory_bytes(work) / bytes_per_s * 1e3
    on_device = statistics.median(step.device_seconds for step in measured) * 1e3
    served = statistics.median(step.seconds for step in measured) * 1e3
    shares = (None, None) if quantized else LEAST_SHARES
    section.add(Line(f"{name}: step on the device", on_device, "ms", floor=floor_ms, least_share=shares[0]))
    section.add(Line(f"{name}: served step", served, "ms", floor=floor_ms, least_share=shares[1]))
