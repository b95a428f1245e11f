"""A whole model on the interpreted kernels: `GpuRunner` gives the tokens of `TorchRunner`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_sections.harness import SECTIONS
from core.config import EngineConfig
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from engine.torch_runner import TorchRunner
from tests.unit.engine.driving import Engine, chunk_of, request

PROMPT = [(7 * index + 3) % 250 for index in range(40)]
CONFIG = EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
REQUESTS = [request("long", PROMPT, max_tokens=3), request("short", PROMPT[:17], max_tokens=3)]


def test_a_poisoned_pool_and_chunked_prompts_give_the_tokens_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    expected = Engine(plain, budget=30).generate(*REQUESTS)
    plain.close()
    limits = StepLimits(max_running=2, max_batched_tokens=30)
    runner = GpuRunner(CONFIG, limits=limits, with_graphs=False)
    runner._pool.tensor.fill_(torch.nan)
    assert Engine(runner, budget=30).generate(*REQUESTS) == expected
    runner.close()


def test_a_pool_of_8_bits_keeps_the_logits_near_those_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    runner = GpuRunner(replace(CONFIG, kv_dtype="fp8"), limits=StepLimits(2, 16), with_graphs=False)
    runner._pool._bytes.fill_(0xFF)
    for start, count in ((0, 17), (17, 1)):
        chunks = [chunk_of(PROMPT, start, count, [3, 1])]
        found, expected = runner.logits(chunks), plain.logits(chunks)
        assert 0 < (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


# ---- benchmarks/gpu.py --rehearse: each section of the GPU benchmark, its kernels under Triton's interpreter.

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # the longest takes half a minute on an idle core
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_rehearses_under_the_interpreter(tmp_path: Path, name: str) -> None:
    """Run from another folder: that of the program holds folders named like packages of Tandem."""
    options = ["--rehearse", "--out", ".", "--seconds", "1500", "--sections", name]
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.log").read_text()
    written = json.loads((tmp_path / "gpu.json").read_text())
    (section,) = written["sections"]
    assert (written["device"], section["name"]) == ("cpu", name)
    assert section["machine"].startswith("device CPU, a rehearsal")
    # Two tokens of one message have no gap, and a rehearsal skips the tests.
    figures = [line for line in section["lines"] if name != "tests" and "gap" not in line["measure"]]
    assert all(line["value"] > 0 for line in figures)
    if name == "tests":
        passed, failed, skipped = (line["value"] for line in section["lines"])
        assert (passed, failed) == (0, 0)
        assert skipped > 50
    if name == "decode":
        assert any("does not fit" in text for text in section["texts"])
