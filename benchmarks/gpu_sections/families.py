"""Greedy float32 tokens of small models of every family, beside those of `transformers` on a CPU.

    whole         prompts of 1, 16 and 90 tokens in one batch
    chunked       steps of 24 tokens
    prefix        the same prompts again, with their blocks in the prefix cache
    preempted     a pool that holds both prompts, and no output
    resumed       a request that has 7 of its tokens, as after the loss of a worker
    handed off    the prompt is computed in another process, and its blocks are copied from there

A way that did not take place (no preemption, no cached token) is an error, not a success.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sections.driver import RunnerDriver, build, request
from benchmarks.gpu_sections.owner_process import Owner, take_blocks
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from core.request import Request, SamplingParams
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from tests.support.transformers_models import FAMILIES, greedy_tokens, save_reference

NUM_TOKENS, NUM_RESUMED = 20, 7
PROMPT = [(11 * index + 5) % 128 + 3 for index in range(100)]
PROMPTS = {str(length): PROMPT[:length] for length in (1, 16, 90)}
SIZES: dict[str, object] = {"hidden_size": 192, "head_dim": 64}
HANDED_OFF = ("llama3",)  # an owner takes seconds to start
LIMITS = StepLimits(max_running=8, max_batched_tokens=128)
FAMILY_S = 4.0

Tokens = dict[str, list[int]]


def run(section: Section) -> None:
    for family in HANDED_OFF if section.rehearse else FAMILIES:
        if section.has_time_for(FAMILY_S if not section.rehearse else 0, family):
            with section.case(family):
                check_family(section, family)


def check_family(section: Section, family: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        reference = save_reference(family, Path(name), SIZES)
        with torch.inference_mode():
            expected = {key: greedy_tokens(reference, prompt, NUM_TOKENS) for key, prompt in PROMPTS.items()}
        options: dict[str, Any] = {"model": name, "dtype": "float32", "kv_memory_mb": 64, "num_threads": 1}
        runner = build(section, LIMITS, **options)
        for way, function in WAYS.items():
            with section.case(f"{family}, {way}"):
                compare(section, f"{family}, {way}", function(runner), expected)
        if family in HANDED_OFF:
            owner = Owner("prefill", section.rehearse, options)
            try:
                compare(section, f"{family}, handed off", handed_off(runner, owner), expected)
            finally:
                owner.stop()
        runner.close()


def compare(section: Section, measure: str, found: Tokens, expected: Tokens) -> None:
    wanted = {key: tokens for key, tokens in expected.items() if key in found}
    differing = sum(a != b for key in wanted for a, b in zip(found[key], wanted[key], strict=True))
    total = sum(map(len, wanted.values()))
    section.add(Line(f"{measure}: tokens that differ, of {total}", differing, "", most=0))


def whole(runner: GpuRunner) -> Tokens:
    return generate(RunnerDriver(runner, LIMITS))


def chunked(runner: GpuRunner) -> Tokens:
    return generate(RunnerDriver(runner, StepLimits(max_running=8, max_batched_tokens=24)))


def generate(driver: RunnerDriver) -> Tokens:
    for name, prompt in PROMPTS.items():
        driver.add(request(name, prompt, max_tokens=NUM_TOKENS))
    return driver.run()


def with_cached_prefix(runner: GpuRunner) -> Tokens:
    driver = RunnerDriver(runner, LIMITS)
    generate(driver)
    again = driver.add(request("90", PROMPTS["90"], max_tokens=NUM_TOKENS))
    found = driver.run()
    assert again.num_cached_tokens >= runner.layout.block_size, "no token was cached"
    return {"90": found["90"]}


def preempted(runner: GpuRunner) -> Tokens:
    """Both prompts fit. The next block of the first sequence is one of the second."""
    needed = [runner.layout.num_blocks_for(len(PROMPTS[name]) + NUM_TOKENS) for name in ("90", "90")]
    driver = RunnerDriver(runner, LIMITS, num_blocks=sum(needed) - 2)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompt = tuple(PROMPTS["90"])
    twins = [driver.add(Request(name, prompt, len(prompt), sampling, cache_salt=name)) for name in ("a", "b")]
    found = driver.run()
    assert sum(twin.num_preemptions for twin in twins) > 0, "no sequence was preempted"
    assert found["a"] == found["b"]
    return {"90": found["b"]}


def resumed(runner: GpuRunner) -> Tokens:
    first = generate(RunnerDriver(runner, LIMITS))["90"]
    driver = RunnerDriver(runner, LIMITS)
    prompt = PROMPTS["90"]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    driver.add(Request("90", (*prompt, *first[:NUM_RESUMED]), len(prompt), sampling))
    return {"90": first[:NUM_RESUMED] + driver.run()["90"]}


def handed_off(runner: GpuRunner, owner: Owner) -> Tokens:
    """The owner computes the prompt and the first token; this process copies the blocks and goes on."""
    prompt = PROMPTS["90"]
    offered = owner.ask({"do": "prefill", "prompt": prompt})
    driver = RunnerDriver(runner, LIMITS)
    wanted = Request(
        "90",
        (*prompt, offered["token"]),
        len(prompt),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
    sequence = driver.add(wanted, len(prompt))
    take_blocks(runner, offered, sequence.block_table)
    return {"90": [offered["token"], *driver.run()["90"]]}


WAYS: dict[str, Callable[[GpuRunner], Tokens]] = {
    "whole": whole,
    "chunked": chunked,
    "prefix": with_cached_prefix,
    "preempted": preempted,
    "resumed": resumed,
}
