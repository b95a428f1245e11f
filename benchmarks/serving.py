"""Start, memory, latency and throughput of a whole fleet on this machine: `make bench`.

`tandem serve` starts a fleet several times. The last fleet then answers closed loops of clients over the public gRPC
API: each client asks one question after another. The prompts share no prefix, so nothing comes from a cache. TTFT runs
from a client's send to the first non-empty token; TPOT = (last - first) / (n - 1).

Memory is the proportional set size: processes that share a page count it in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.asking import FIRST_WORD_ID, LAST_WORD_ID, Answer, ask
from benchmarks.engine.figures import WEIGHT_BYTES, num_weights
from benchmarks.processes import serving
from benchmarks.report import Line, Report
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model
from tandem_client import AsyncClient

ADDRESS = "127.0.0.1:50651"
TIMEOUT_S = 300.0
SETTLE_S = 1.0
MOST_OVERHEAD_MB = 500  # of a worker, beside weights and pool
SHORT_PROMPT = 16  # tokens, of the first question after a start
MB = 1 << 20


async def ask_once(client: AsyncClient, rng: random.Random, prompt_tokens: int, output_tokens: int) -> Answer:
    prompt = [rng.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(prompt_tokens)]
    answer = await ask(client, prompt, output_tokens, TIMEOUT_S, time.perf_counter())
    assert len(answer.times) == output_tokens, answer.error
    return answer


async def first_token() -> None:
    async with AsyncClient(ADDRESS) as client:
        await ask_once(client, random.Random(0), SHORT_PROMPT, 1)


def settled_sizes(pid: int) -> list[int]:
    """Bytes of each process of the fleet, the largest first, once they stop growing: pools are touched late."""
    before = -MB
    while True:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        sizes = sorted((process.memory_full_info().pss for process in family), reverse=True)
        if sum(sizes) <= before + MB:
            return sizes
        before = sum(sizes)
        time.sleep(SETTLE_S)


def memory(report: Report, arguments: argparse.Namespace, sizes: list[int]) -> None:
    """The workers are the largest processes. The goal: weights once, the KV pool, and 500 MB."""
    weight_bytes = sum(num_weights(load_config(resolve_model(arguments.model)))) * WEIGHT_BYTES
    most = weight_bytes / MB + EngineConfig().host_kv_memory_mb + MOST_OVERHEAD_MB
    num_workers = arguments.prefill + arguments.decode
    report.add(Line("resident memory of the largest worker", sizes[0] / MB, "MB", most=round(most)))
    report.add(Line("resident memory of Ray, supervisor, router and driver", sum(sizes[num_workers:]) / MB, "MB"))


async def load(report: Report, arguments: argparse.Namespace) -> None:
    """Each repeat has every level of concurrency in turn."""
    answers: defaultdict[int, list[Answer]] = defaultdict(list)
    tokens_per_s: defaultdict[int, list[float]] = defaultdict(list)
    sizes = arguments.prompt_tokens, arguments.output_tokens

    async def one_client(client: AsyncClient, seed: int) -> list[Answer]:
        rng = random.Random(seed)
        return [await ask_once(client, rng, *sizes) for _ in range(arguments.requests)]

    async with AsyncClient(ADDRESS) as client:
        await ask_once(client, random.Random(0), arguments.prompt_tokens, 4)  # connects the workers
        for repeat in range(arguments.repeats):
            for level in arguments.concurrency:
                seeds = [(repeat * 100 + level) * 1000 + index for index in range(level)]
                start = time.perf_counter()
                per_client = await asyncio.gather(*(one_client(client, seed) for seed in seeds))
                found = [answer for of_one in per_client for answer in of_one]
                tokens_per_s[level].append(len(found) * arguments.output_tokens / (time.perf_counter() - start))
                answers[level] += found
    for level in arguments.concurrency:
        clients = f"{level} client{'s' if level > 1 else ''}"
        ttft = [answer.times[0] for answer in answers[level]]
        tpot = [statistics.fmean(answer.gaps or [0.0]) for answer in answers[level]]
        for word, times in (("TTFT", ttft), ("TPOT", tpot)):
            report.add(Line(f"{clients}: {word}, median", statistics.median(times) * 1e3, "ms"))
            report.add(Line(f"{clients}: {word}, worst", max(times) * 1e3, "ms"))
        report.add(Line(f"{clients}: tokens of all together", statistics.median(tokens_per_s[level]), "tokens/s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--starts", type=int, default=3, help="of the fleet")
    parser.add_argument("--repeats", type=int, default=3, help="of each level of concurrency")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="clients at one time")
    parser.add_argument("--requests", type=int, default=4, help="of each client in a repeat")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    arguments = parser.parse_args()
    report = Report("serving")
    report.say(f"{arguments.model}, {arguments.prompt_tokens} prompt and {arguments.output_tokens} output tokens, "
               f"{arguments.prefill} prefill and {arguments.decode} decode workers")  # fmt: skip
    command: list[str | Path] = [
        Path(sys.executable).with_name("tandem"), "serve", "--model", arguments.model,
        "--kv-memory-mb", str(EngineConfig().host_kv_memory_mb), "--port", ADDRESS.rpartition(":")[2],
        "--prefill", str(arguments.prefill), "--decode", str(arguments.decode),
    ]  # fmt: skip
    starts = []
    for left in reversed(range(arguments.starts)):
        begun = time.perf_counter()
        with serving(command) as pid:
            asyncio.run(first_token())
            starts.append(time.perf_counter() - begun)
            if left == 0:
                report.add(Line("tandem serve: command to first token", statistics.median(starts), "s"))
                memory(report, arguments, settled_sizes(pid))
                asyncio.run(load(report, arguments))
    report.write()


if __name__ == "__main__":
    main()
