"""A worker with vLLM inside beside the bare engine, and what Tandem's connector does: `make bench-vllm`.

    worker                           32 streams go through a decode worker, over gRPC, and the same streams through its
                                     AsyncLLM: one engine, in turns
    handoff, cancel, prefix, drain   between workers (benchmarks/vllm/hand_offs.py)

Prompts are new each time, so nothing comes from a cache.

The goodput of whole fleets is in benchmarks/goodput, which the same target runs for a trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.asking import Answer, ask_worker, random_prompts
from benchmarks.processes import ChildProcess
from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.vllm import hand_offs
from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from tests.support.vllm_fleet import started_workers

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 64
LEAST_SHARE, MOST_MS = 0.95, 1.0  # the goals: of the bare engine's tokens/s, and of a token's time


def measure_worker(report: Report, arguments: argparse.Namespace) -> None:
    python, core = python_of(VllmConfig()), min(os.sched_getaffinity(0))
    config = {"engine": {"name": "vllm", "model": str(default_model_dir()), "kv_memory_mb": 2048}}
    command: list[str | Path] = [python, "-m", "benchmarks.vllm.program", json.dumps(config), str(core)]
    program = ChildProcess("a vLLM worker", command, variables(python), ROOT)
    sizes = arguments.streams, PROMPT_TOKENS
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "worker": []}
    try:
        address = program.call("address")
        for repeat in range(arguments.repeats + 1):
            bare = program.call("bare", prompts=random_prompts(*sizes, 2 * repeat), max_tokens=arguments.tokens)
            prompts = random_prompts(*sizes, 2 * repeat + 1)
            through = asyncio.run(ask_worker(address, prompts, arguments.tokens))
            if repeat:  # the first one warms up
                found["bare"].append(figures(list(map(Answer, bare))))
                found["worker"].append(figures(through))
    finally:
        program.stop()
    speeds, gaps = ({name: statistics.median(pair[place] for pair in pairs) for name, pairs in found.items()}
                    for place in (0, 1))  # fmt: skip
    streams = f"{arguments.streams} streams of a worker"
    report.add(Line(f"{streams}: all tokens", speeds["worker"], "tokens/s", "bare AsyncLLM", speeds["bare"],
                    least_ratio=LEAST_SHARE))  # fmt: skip
    report.add(Line(f"{streams}: a token later than bare", (gaps["worker"] - gaps["bare"]) * 1e3, "ms", most=MOST_MS))


def figures(answers: Sequence[Answer]) -> tuple[float, float]:
    """Tokens of all streams a second, and the mean gap of a stream in seconds."""
    seconds = max(answer.times[-1] for answer in answers)
    return sum(len(answer.times) for answer in answers) / seconds, statistics.fmean(
        gap for answer in answers for gap in answer.gaps
    )


def main() -> None:
    parser = parser_of(__doc__, ("worker", *hand_offs.PARTS), repeats=3)
    parser.add_argument("--streams", type=int, default=32, help="of the worker")
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    arguments = parser.parse_args()
    if not python_of(VllmConfig()).exists():
        sys.exit("vLLM is not installed: run `make vllm`")
    report = Report("vllm")
    parts: dict[str, Callable[[], None]] = {"worker": functools.partial(measure_worker, report, arguments)}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        @functools.cache
        def workers() -> hand_offs.Workers:
            return stack.enter_context(started_workers(logs, *hand_offs.PLACES, changes=hand_offs.CHANGES))

        def run(part: hand_offs.Part) -> None:
            asyncio.run(part(report, workers(), arguments.repeats))

        parts |= {name: functools.partial(run, part) for name, part in hand_offs.PARTS.items()}
        run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
