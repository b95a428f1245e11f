"""Prompts of an 8B model with random weights, beside the time of their operations at the rate of a matrix product.

Attention counts the pairs of a causal mask only. The prompt of several chunks attends to a cached prefix, and does so
once more over KV of 8 bits.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu_sections.section import Section, build, matrix_rate
from benchmarks.report import Line
from benchmarks.runner_driver import RunnerDriver, random_prompt, request
from core.cost.step_cost import StepWork
from engine.runner import StepLimits

CASES = [(2048, 2048), (8192, 8192), (8192, 2048)]  # (tokens of the prompt, tokens of a step)
TINY_CASES = [(40, 40), (40, 16)]
REPEATS, TINY_REPEATS = 5, 1  # interpreted, each takes seconds
CASE_S, MODEL_S = 8.0, 25.0
BFLOAT16 = "bfloat16 KV"


def run(section: Section) -> None:
    cases = TINY_CASES if section.rehearse else CASES
    multiplied = matrix_rate(section.device, 64 if section.rehearse else 8192)
    section.note(f"matrix products run at {multiplied / 1e12:.3g} TFLOP/s")
    plain = measure_model(section, cases, multiplied, {})
    if section.has_time_for(MODEL_S, "fp8 KV"):
        measure_model(section, cases[-1:], multiplied, plain, kv_dtype="fp8")


def measure_model(
    section: Section, cases: list[tuple[int, int]], flop_per_s: float, beside: dict[str, float], **options: Any
) -> dict[str, float]:
    """`beside`: milliseconds by case of the model that this one is compared with. Returns its own."""
    runner = build(section, StepLimits(max_running=8, max_batched_tokens=max(count for _, count in cases)), **options)
    assert runner.sizes is not None
    found: dict[str, float] = {}
    for num_tokens, at_once in cases:
        name = f"{num_tokens:,} tokens, {at_once:,} at once"
        if not section.has_time_for(CASE_S, name):
            continue
        driver = RunnerDriver(runner, StepLimits(max_running=8, max_batched_tokens=at_once))
        on_device, served = [], []
        for repeat in range((TINY_REPEATS if section.rehearse else REPEATS) + 1):
            driver.clear()
            prompt = random_prompt(num_tokens, runner.info.vocab_size, repeat)
            driver.add(request(f"{name} {repeat}", prompt, max_tokens=1))
            driver.run()
            on_device.append(sum(step.device_seconds for step in driver.times))
            served.append(sum(step.seconds for step in driver.times))
        work = StepWork(0, 0, num_tokens, num_tokens * (num_tokens + 1) / 2)
        floor_ms = (runner.sizes.flop(work) + 2 * runner.sizes.num_head_weights) / flop_per_s * 1e3
        found[name] = statistics.median(on_device[1:]) * 1e3
        if name in beside:
            section.add(Line(f"{name}, fp8 KV: on the device", found[name], "ms", BFLOAT16, beside[name]))
            continue
        section.add(Line(f"{name}: on the device", found[name], "ms", floor=floor_ms, least_share=0.6))
        section.add(Line(f"{name}: served", statistics.median(served[1:]) * 1e3, "ms", floor=floor_ms))
    runner.close()
    return found
