"""Each benchmark starts and prints its figures; goals, floors and ratios follow from what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.engine.figures import MIN_STEPS, OURS, PLAIN, VLLM, Figures, percent_around
from benchmarks.engine.tandem_worker import Worker
from benchmarks.processes import ChildEnded, ChildProcess
from benchmarks.report import Line, Report
from core.config import EngineConfig
from model_files.builtin_configs import RANDOM_CONFIGS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def run_benchmark(directory: Path, module: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *options]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def modules_to_start() -> list[str]:
    """The modules that the Makefile's targets run, without those that a test below runs."""
    modules = re.findall(r"python -m ((?:benchmarks|tests\.tools)\.\S+)", (ROOT / "Makefile").read_text())
    return sorted(
        set(modules) - {"benchmarks.transfer", "benchmarks.quantization", "benchmarks.routers", "benchmarks.policies"}
    )


# In one process, because each would import torch.
LIST_OPTIONS = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (module, end.code)
"""


def test_benchmarks_that_are_too_slow_for_a_test_start_and_list_their_options(tmp_path: Path) -> None:
    modules = modules_to_start()
    command = [sys.executable, "-c", LIST_OPTIONS, *modules]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(modules) > 5


def test_the_hand_off_is_timed_beside_process_vm_readv(tmp_path: Path) -> None:
    options = ["--transports", "nixl", "--parts", "unequal", "--repeats", "1", "--pool-mb", "16"]
    done = run_benchmark(tmp_path, "benchmarks.transfer", *options)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "build/bench/transfer.json").read_text())["lines"]
    assert [line["measure"] for line in lines] == [
        "nixl, shared memory, verify off: half the heads of 2 MiB blocks",
        "nixl, shared memory, verify on: half the heads of 2 MiB blocks",
    ]
    assert all(line["value"] > 0 for line in lines)


def test_the_engine_under_measurement_times_its_steps_and_their_parts() -> None:
    worker = Worker(EngineConfig(model="random:llama-tiny", dtype="bfloat16", kv_memory_mb=32, num_threads=1))
    worker.fill(batch=4, context=64)
    worker.keep(batch=2)
    times = worker.steps(count=3)
    assert times.keys() == {"ms", "model_ms", "attention_ms", "emit_ms", "length"}
    assert all(0 < model < step for model, step in zip(times["model_ms"], times["ms"], strict=True))
    assert times["length"] == [66, 67, 68]
    assert worker.prefill(tokens=40)["ms"] > 0


def test_quantized_products_are_timed_beside_bfloat16(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "benchmarks.quantization", "--repeats", "1", "--rows", "1")
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "build/bench/quantization.json").read_text())["lines"]
    assert [line["measure"] for line in lines] == ["1 rows, bfloat16", "1 rows, int8", "1 rows, int4"]
    assert lines[1]["ratio"] == pytest.approx(lines[0]["value"] / lines[1]["value"])


def test_several_routers_are_compared_with_one(tmp_path: Path) -> None:
    """A trace of conversations that have two turns each."""
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 100 * number, "input_length": 600, "output_length": 8, "hash_ids": [0, 1 + number % 20]}
        for number in range(40)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    options = ["--trace", str(trace), "--quick", "--requests", "40", "--processes", "1"]
    done = run_benchmark(tmp_path, "benchmarks.routers", *options)
    assert done.returncode == 0, done.stderr
    lines = {line["measure"]: line for line in json.loads((tmp_path / "build/bench/routers.json").read_text())["lines"]}
    for routers in ("1 router", "2 routers", "4 routers"):
        assert lines[f"4 + 4 workers, {routers}: hit ratio"]["value"] > 0.2
        assert lines[f"4 + 4 workers, {routers}: TTFT p99"]["value"] > 0
    assert lines["4 + 4 workers, 4 routers: TTFT p50"]["holds"] is not None
    assert "0 requests failed" in done.stdout


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "benchmarks.routers", "--trace", "nowhere.jsonl")
    assert done.returncode == 1
    assert "nowhere.jsonl" in done.stderr
    assert "kvcache-ai/Mooncake" in done.stderr


def test_a_measured_program_answers_line_by_line_and_its_last_words_are_reported() -> None:
    program = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin:\n  print(line.upper(), end='', flush=True)\n"
    child = ChildProcess("echo", [sys.executable, "-c", program + "  sys.exit('no more')"], {"SOME": "value"})
    assert child.call("it", much=1) == {"DO": "IT", "MUCH": 1}
    with pytest.raises(ChildEnded, match="echo ended: no more"):
        child.call("more")
    child.stop()


def test_less_time_is_faster_and_more_tokens_are_faster() -> None:
    step = Line("a step", 8.0, "ms", VLLM, 10.0, floor=4.0, least_ratio=1.25)
    assert (step.ratio, step.share_of_floor, step.holds) == (1.25, 0.5, True)
    prefill = Line("a prompt", 1000.0, "tokens/s", VLLM, 900.0, floor=2000.0, least_ratio=1.25)
    assert prefill.ratio == pytest.approx(1.111, abs=1e-3)
    assert (prefill.share_of_floor, prefill.holds) == (0.5, False)


def test_a_peer_that_was_not_measured_gives_no_verdict() -> None:
    line = Line("a step", 8.0, "ms", VLLM, None, least_ratio=1.25)
    assert (line.ratio, line.holds) == (None, None)
    assert "vLLM: not measured" in line.row()


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"])
    figures.take_floors({"read_bytes_per_s": 1e9, "flop_per_s": 1e12, "kv_bytes_per_token": 1000})
    reading_s = figures.decode_floor_ms(512, 8) / 1e3
    num_weights = (reading_s * 1e9 - 8 * 512 * 1000) / 2
    figures.flop_per_s = 1e6
    assert figures.decode_floor_ms(512, 8) == pytest.approx(1e3 * 16 * num_weights / 1e6)
    figures.take_floors({"read_bytes_per_s": 1.0, "flop_per_s": 1.0, "kv_bytes_per_token": 1000})
    assert figures.read_bytes_per_s == 1e9, "a disturbed measurement is no floor"


def test_one_weight_format_has_to_reach_llama_cpp_and_each_has_to_reach_bfloat16() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"])
    for name, milliseconds in ((PLAIN, 20.0), (f"{OURS} int8", 12.0), (f"{OURS} int4", 9.0), ("llama.cpp", 10.0)):
        figures.steps[name, 512, 1, "ms"] = [milliseconds]
    goals = {(line.measure.split(", ")[1], line.peer): line.holds for line in figures.lines()}
    assert goals == {
        ("int8", "llama.cpp Q4_1"): None,
        ("int4", "llama.cpp Q4_1"): True,
        ("int8", PLAIN): True,
        ("int4", PLAIN): True,
    }


def test_attention_is_charged_with_the_bytes_of_sequences_at_their_real_length() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"], read_bytes_per_s=1e9, kv_bytes_per_token=1000)
    figures.steps[OURS, 512, 8, "attention_ms"] = [8.0]
    figures.steps[OURS, 512, 8, "length"] = [520.0, 540.0, 560.0]
    (line,) = (line for line in figures.lines() if "attention" in line.measure)
    assert line.value == pytest.approx(8 * 540 * 1000 / 8e-3 / 1e9)
    assert (line.ratio, line.holds) == (pytest.approx(0.54), False)


def test_the_time_around_the_model_lies_between_two_models_of_the_whole_batch() -> None:
    steps = [(8, step * 10.0 + 1.0, step * 10.0 + 10.0) for step in range(MIN_STEPS + 1)]
    assert percent_around(steps, 8) == pytest.approx(10)
    with pytest.raises(RuntimeError, match="only 3 steps"):
        percent_around(steps[:4], 8)


def test_every_printed_line_is_written_as_json_and_as_a_table_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=200)
    report = Report("trial", console)
    report.add(Line("slow", 2.0, "s", most=1))
    report.add(Line("known", 2.0, "s", "a peer", 3.0))
    report.write()
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert {"machine", "commit", "date", "load average"} < written.keys()
    assert [(line["measure"], line["ratio"], line["holds"]) for line in written["lines"]] == [
        ("slow", None, False),
        ("known", 1.5, None),
    ]
    printed = console.export_text()
    assert "MISSED" in printed
    assert "1.5 x a peer" in printed
    assert "| known | 2 s | a peer: 3 | 1.5 |  |  |" in Path("build/bench/trial.md").read_text()
