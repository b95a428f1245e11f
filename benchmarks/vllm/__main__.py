"""A worker with vLLM inside beside the bare engine, and what Tandem's connector does: `make bench-vllm`.

    worker                           32 streams go through a decode worker, over gRPC, and the same streams through its
                                     AsyncLLM: one engine, in turns (benchmarks/vllm/bare.py)
    handoff, cancel, prefix, drain   between workers (benchmarks/vllm/hand_offs.py)

Prompts are new each time, so nothing comes from a cache.

The goodput of whole fleets is in benchmarks/goodput, which the same target runs for a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.asking import random_prompts
from benchmarks.dataplane.load import ask_worker
from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.service import Role, ServiceProcess
from benchmarks.vllm import hand_offs
from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from tests.support.vllm_fleet import started_workers

CONFIG = {"engine": {"name": "vllm", "model": str(default_model_dir()), "kv_memory_mb": 2048}}
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
LEAST_SHARE, MOST_MS = 0.95, 1.0  # the goals: of the bare engine's tokens/s, and of a token's time


def measure_worker(report: Report, repeats: int) -> None:
    python = python_of(VllmConfig())
    role = Role("decode", config=CONFIG, cores=(min(os.sched_getaffinity(0)),), step_s=None)
    worker = ServiceProcess(role, python=python, environment=variables(python))
    sizes = STREAMS, PROMPT_TOKENS
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "worker": []}
    try:
        for repeat in range(repeats + 1):
            alone = {"prompts": random_prompts(*sizes, 2 * repeat), "max_tokens": OUTPUT_TOKENS, "repeat": repeat}
            times = worker.call("apply", function="benchmarks.vllm.bare:bare", **alone)
            prompts = random_prompts(*sizes, 2 * repeat + 1)
            through = ask_worker(worker.address, prompts, OUTPUT_TOKENS)
            if repeat:  # the first one warms up
                found["bare"].append(figures(times))
                found["worker"].append(figures(through))
    finally:
        worker.stop()
    speeds, gaps = ({name: statistics.median(pair[place] for pair in pairs) for name, pairs in found.items()}
                    for place in (0, 1))  # fmt: skip
    streams = f"{STREAMS} streams of a worker"
    report.add(Line(f"{streams}: all tokens", speeds["worker"], "tokens/s", "bare AsyncLLM", speeds["bare"],
                    least_ratio=LEAST_SHARE))  # fmt: skip
    report.add(Line(f"{streams}: a token later than bare", (gaps["worker"] - gaps["bare"]) * 1e3, "ms", most=MOST_MS))


def figures(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Tokens of all streams a second, and the mean gap of a stream in seconds."""
    gaps = [after - before for of_one in times for before, after in pairwise(of_one)]
    return sum(map(len, times)) / max(of_one[-1] for of_one in times), statistics.fmean(gaps)


def main() -> None:
    arguments = parser_of(__doc__, ("worker", *hand_offs.PARTS), repeats=3).parse_args()
    if not python_of(VllmConfig()).exists():
        sys.exit("vLLM is not installed: run `make vllm`")
    report = Report("vllm")
    parts: dict[str, Callable[[], None]] = {"worker": lambda: measure_worker(report, arguments.repeats)}
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
