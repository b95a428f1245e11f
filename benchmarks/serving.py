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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.engine.figures import WEIGHT_BYTES, num_weights
from benchmarks.processes import serving
from benchmarks.report import Line, Report
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

ADDRESS = "127.0.0.1:50651"
TIMEOUT_S = 300.0
SETTLE_S = 1.0
MOST_OVERHEAD_MB = 500  # of a worker, beside weights and pool
SHORT_PROMPT = 16  # tokens, of the first question after a start
MB = 1 << 20
FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    ttft_ms: float
    tpot_ms: float
    num_tokens: int


def fleet(arguments: argparse.Namespace) -> AbstractContextManager[int]:
    """`tandem serve`, with its process id."""
    command: list[str | Path] = [
        Path(sys.executable).with_name("tandem"), "serve", "--model", arguments.model,
        "--kv-memory-mb", str(EngineConfig().host_kv_memory_mb), "--port", ADDRESS.rpartition(":")[2],
        "--prefill", str(arguments.prefill), "--decode", str(arguments.decode),
    ]  # fmt: skip
    return serving(command)


async def ask(client: AsyncClient, rng: random.Random, prompt_tokens: int, output_tokens: int) -> Sample:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(rng.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(prompt_tokens))
    request.sampling.temperature = 0.0
    request.stop.max_tokens = output_tokens
    request.stop.ignore_eos = True
    start = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    async for response in client.generate(request, TIMEOUT_S):
        if response.HasField("tokens"):
            last = time.perf_counter()
            first = first or last
            num_tokens += len(response.tokens.token_ids)
    return Sample((first - start) * 1e3, (last - first) * 1e3 / max(1, num_tokens - 1), num_tokens)


async def first_token() -> None:
    async with AsyncClient(ADDRESS) as client:
        await ask(client, random.Random(0), SHORT_PROMPT, 1)


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
    samples: defaultdict[int, list[Sample]] = defaultdict(list)
    tokens_per_s: defaultdict[int, list[float]] = defaultdict(list)

    async def one_client(client: AsyncClient, seed: int) -> list[Sample]:
        rng = random.Random(seed)
        sizes = arguments.prompt_tokens, arguments.output_tokens
        return [await ask(client, rng, *sizes) for _ in range(arguments.requests)]

    async with AsyncClient(ADDRESS) as client:
        await ask(client, random.Random(0), arguments.prompt_tokens, 4)  # connects the workers
        for repeat in range(arguments.repeats):
            for level in arguments.concurrency:
                seeds = [(repeat * 100 + level) * 1000 + index for index in range(level)]
                start = time.perf_counter()
                per_client = await asyncio.gather(*(one_client(client, seed) for seed in seeds))
                seconds = time.perf_counter() - start
                found = [sample for samples_of_one in per_client for sample in samples_of_one]
                samples[level] += found
                tokens_per_s[level].append(sum(sample.num_tokens for sample in found) / seconds)
    for level in arguments.concurrency:
        clients = f"{level} client{'s' if level > 1 else ''}"
        ttft, tpot = ([getattr(sample, name) for sample in samples[level]] for name in ("ttft_ms", "tpot_ms"))
        for word, times in (("TTFT", ttft), ("TPOT", tpot)):
            report.add(Line(f"{clients}: {word}, median", statistics.median(times), "ms"))
            report.add(Line(f"{clients}: {word}, worst", max(times), "ms"))
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
    starts = []
    for left in reversed(range(arguments.starts)):
        begun = time.perf_counter()
        with fleet(arguments) as pid:
            asyncio.run(first_token())
            starts.append(time.perf_counter() - begun)
            if left == 0:
                report.add(Line("tandem serve: command to first token", statistics.median(starts), "s"))
                memory(report, arguments, settled_sizes(pid))
                asyncio.run(load(report, arguments))
    report.write()


if __name__ == "__main__":
    main()
