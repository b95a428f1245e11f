"""A worker beside the bare engine of vLLM, and streams whose engine dies: `make bench-vllm`.

    worker   32 streams through a decode worker, over gRPC, beside the same streams through its AsyncLLM: one engine, in
             turns. Prompts are new each time, so nothing comes from a cache
    kill     kill -9 of a decode worker under load, in a fleet of two, beside kill -9 of vLLM alone on both cores. The
             time runs from the kill until every stream has its next token; vLLM alone has to start again first

The goodput of whole fleets is in benchmarks/goodput, which the same target runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.asking import Answer, ask, ask_worker, random_prompts
from benchmarks.engine import programs
from benchmarks.processes import ChildEnded, ChildProcess, tandem
from benchmarks.report import Line, Report, parser_of, run_parts
from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from tandem_client import AsyncClient

ROOT = Path(__file__).resolve().parents[2]
PORT = 18652
ADDRESS = f"127.0.0.1:{PORT}"
TIMEOUT_S = 600.0
LEAST_SHARE, MOST_MS = 0.95, 1.0  # the goals: of the bare engine's tokens/s, and of a token's time
PARTS = ("worker", "kill")


# ---- the worker beside its engine


def measure_worker(report: Report, arguments: argparse.Namespace) -> None:
    python, core = python_of(VllmConfig()), min(os.sched_getaffinity(0))
    config = {"engine": {"name": "vllm", "model": str(default_model_dir()), "kv_memory_mb": 2048}}
    command: list[str | Path] = [python, "-m", "benchmarks.vllm.program", json.dumps(config), str(core)]
    program = ChildProcess("a vLLM worker", command, variables(python), ROOT)
    sizes = arguments.streams, arguments.prompt_tokens
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


# ---- a kill under load


def kill_worker(report: Report, arguments: argparse.Namespace) -> float:
    """Kill one of two decode workers. Returns the seconds until every stream has its next token."""
    with tandem(PORT, "--engine", "vllm", "--prefill", "0", "--decode", "2", "--kv-memory-mb", "1024") as pid:
        answers, killed_at = asyncio.run(killed_streams(arguments, pid))
    failed = sum(bool(answer.error) or len(answer.times) < arguments.tokens for answer in answers)
    report.add(Line(f"killed worker of two: failed of {len(answers)} streams", failed, "streams", most=0))
    return max(next((t for t in answer.times if t > killed_at), killed_at) for answer in answers) - killed_at


async def killed_streams(arguments: argparse.Namespace, pid: int) -> tuple[list[Answer], float]:
    start = time.perf_counter()

    async def kill_one() -> float:
        await asyncio.sleep(arguments.kill_after)
        os.kill(engine_owners(pid)[0], signal.SIGKILL)
        return time.perf_counter() - start

    async with AsyncClient(ADDRESS) as client:
        await ask(client, random_prompts(1, 16, seed=99)[0], 2, TIMEOUT_S, start)  # connects the workers
        start = time.perf_counter()
        prompts = random_prompts(arguments.kill_streams, arguments.prompt_tokens)
        calls = [ask(client, prompt, arguments.tokens, TIMEOUT_S, start) for prompt in prompts]
        answers, killed_at = await asyncio.gather(asyncio.gather(*calls), kill_one())
    return answers, killed_at


def engine_owners(pid: int) -> list[int]:
    """The processes of the workers in a fleet: the parents of vLLM's engines."""
    family = psutil.Process(pid).children(recursive=True)
    return [process.ppid() for process in family if any("EngineCore" in word for word in process.cmdline())]


def kill_vllm(report: Report, arguments: argparse.Namespace) -> float | None:
    """Kill vLLM alone under the same streams, and start it again. Returns the seconds until its next token."""
    start = programs.serving_vllm("0-1")
    if start is None:
        report.say("vLLM alone is not installed and left out")
        return None
    prompts = random_prompts(arguments.kill_streams, arguments.prompt_tokens)
    requests = [{"at": 0.0, "prompt": prompt, "max_tokens": arguments.tokens} for prompt in prompts]
    process = start(None)
    process.call("serve", requests=requests[:1], timeout_s=TIMEOUT_S)  # warms up
    killer = threading.Timer(arguments.kill_after, os.kill, (process.process_id, signal.SIGKILL))
    killer.start()
    try:
        process.call("serve", requests=requests, timeout_s=TIMEOUT_S)
        report.say("vLLM alone had answered before the kill: take a longer --tokens")
        return None
    except ChildEnded:
        killed_at = time.perf_counter()
    finally:
        killer.cancel()
        process.stop()
    report.add(Line(f"killed vLLM alone: failed of {len(requests)} streams", len(requests), "streams"))
    again = start(None)
    try:
        again.call("serve", requests=[requests[0] | {"max_tokens": 1}], timeout_s=TIMEOUT_S)
        return time.perf_counter() - killed_at
    finally:
        again.stop()


def measure_kill(report: Report, arguments: argparse.Namespace) -> None:
    ours, theirs = kill_worker(report, arguments), kill_vllm(report, arguments)
    report.add(Line("from the kill to the next token of every stream", ours, "s", "vLLM alone", theirs))


def main() -> None:
    parser = parser_of(__doc__, PARTS, repeats=3)
    parser.add_argument("--streams", type=int, default=32, help="of the worker")
    parser.add_argument("--kill-streams", type=int, default=12, help="under the kill")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--kill-after", type=float, default=3.0, help="seconds of load before the kill")
    arguments = parser.parse_args()
    if not python_of(VllmConfig()).exists():
        sys.exit("vLLM is not installed: run `make vllm`")
    report = Report("vllm")
    parts = {
        "worker": lambda: measure_worker(report, arguments),
        "kill": lambda: measure_kill(report, arguments),
    }
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
