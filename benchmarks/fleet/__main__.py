"""A fleet as a user starts it: `make bench`, with PARTS="..." for other parts.

    start     from the command to the first token; memory
    load      TTFT, TPOT and tokens/s of clients that ask one question after another
    formats   what a JSON schema costs beside none (3 minutes)
    guesses   what guessed tokens gain beside none: QUESTIONS=question.jsonl, Spec-Bench's (30 minutes)

Each part starts a fleet of its own by `tandem serve` and talks to it over the public gRPC API. Within a part the
compared requests go to the same fleet, in turns, and differ in the compared field alone. Prompts of `load` share no
prefix, so nothing comes from a cache. TTFT runs from the send to the first token; TPOT = (last - first) / (n - 1).

Memory is the proportional set size: processes that share a page count it in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.asking import Answer, ask, random_prompts
from benchmarks.engine.figures import WEIGHT_BYTES, num_weights
from benchmarks.fleet import formats, guesses
from benchmarks.processes import tandem
from benchmarks.report import Line, Report, parser_of, run_parts
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model
from tandem_client import AsyncClient

PORT = 50651
MODEL = "smollm2-135m"
FLAGS = ("--model", MODEL, "--kv-memory-mb", str(EngineConfig().host_kv_memory_mb))
ADDRESS = f"127.0.0.1:{PORT}"
TIMEOUT_S = 300.0
SETTLE_S = 1.0
MOST_OVERHEAD_MB = 500  # of a worker, beside weights and pool
SHORT_PROMPT = 16  # tokens, of the first question after a start
NUM_WORKERS = 2  # one of each role
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 32
LEVELS, NUM_REQUESTS = (1, 4), 4  # clients at one time; requests of each client in a repeat
MB = 1 << 20
PARTS = ("start", "load", "formats", "guesses")


async def ask_once(client: AsyncClient, seed: int, prompt_tokens: int, output_tokens: int) -> Answer:
    [prompt] = random_prompts(1, prompt_tokens, seed)
    answer = await ask(client, prompt, output_tokens, TIMEOUT_S, time.perf_counter())
    assert len(answer.times) == output_tokens, answer.error
    return answer


# ---- start


async def first_token() -> None:
    async with AsyncClient(ADDRESS) as client:
        await ask_once(client, 0, SHORT_PROMPT, 1)


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


def measure_start(report: Report, arguments: argparse.Namespace) -> None:
    seconds = []
    for _ in range(arguments.repeats):
        begun = time.perf_counter()
        with tandem(PORT, *FLAGS) as pid:
            asyncio.run(first_token())
            seconds.append(time.perf_counter() - begun)
            sizes = settled_sizes(pid) if len(seconds) == arguments.repeats else []
    report.add(Line("tandem serve: command to first token", statistics.median(seconds), "s"))
    # The workers are the largest processes. The goal: weights once, the KV pool, and 500 MB.
    weight_bytes = sum(num_weights(load_config(resolve_model(MODEL)))) * WEIGHT_BYTES
    most = weight_bytes / MB + EngineConfig().host_kv_memory_mb + MOST_OVERHEAD_MB
    report.add(Line("resident memory of the largest worker", sizes[0] / MB, "MB", most=round(most)))
    report.add(Line("resident memory of Ray, supervisor, router and driver", sum(sizes[NUM_WORKERS:]) / MB, "MB"))


# ---- load


async def load(report: Report, repeats: int) -> None:
    """Each repeat has every level of concurrency in turn."""
    answers: defaultdict[int, list[Answer]] = defaultdict(list)
    tokens_per_s: defaultdict[int, list[float]] = defaultdict(list)

    async def one_client(client: AsyncClient, seed: int) -> list[Answer]:
        seeds = range(seed * 100, seed * 100 + NUM_REQUESTS)
        return [await ask_once(client, number, PROMPT_TOKENS, OUTPUT_TOKENS) for number in seeds]

    async with AsyncClient(ADDRESS) as client:
        await ask_once(client, 0, PROMPT_TOKENS, 4)  # connects the workers
        for repeat in range(repeats):
            for level in LEVELS:
                seeds = [(repeat * 100 + level) * 1000 + index for index in range(level)]
                start = time.perf_counter()
                per_client = await asyncio.gather(*(one_client(client, seed) for seed in seeds))
                found = [answer for of_one in per_client for answer in of_one]
                tokens_per_s[level].append(len(found) * OUTPUT_TOKENS / (time.perf_counter() - start))
                answers[level] += found
    for level in LEVELS:
        clients = f"{level} client{'s' if level > 1 else ''}"
        ttft = [answer.times[0] for answer in answers[level]]
        tpot = [statistics.fmean(answer.gaps or [0.0]) for answer in answers[level]]
        for word, times in (("TTFT", ttft), ("TPOT", tpot)):
            report.add(Line(f"{clients}: {word}, median", statistics.median(times) * 1e3, "ms"))
            report.add(Line(f"{clients}: {word}, worst", max(times) * 1e3, "ms"))
        report.add(Line(f"{clients}: tokens of all together", statistics.median(tokens_per_s[level]), "tokens/s"))


def measure_load(report: Report, arguments: argparse.Namespace) -> None:
    report.say(f"{MODEL}, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, one worker of each role")
    with tandem(PORT, *FLAGS):
        asyncio.run(load(report, arguments.repeats))


# ---- the other parts


def measure_formats(report: Report, arguments: argparse.Namespace) -> None:
    with tandem(PORT, "--model", MODEL):
        asyncio.run(formats.measure(report, ADDRESS, arguments.repeats))


def measure_guesses(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.questions is None:
        report.say("the gain of guesses needs questions, and is left out: --questions question.jsonl")
        return
    questions = guesses.read_questions(arguments.questions)
    with tandem(PORT, "--model", MODEL):
        asyncio.run(guesses.measure(report, ADDRESS, questions, arguments.repeats))


def main() -> None:
    parser = parser_of(__doc__, PARTS, repeats=3)
    parser.set_defaults(parts=["start", "load"])
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl (github.com/hemingkx/Spec-Bench)")
    arguments = parser.parse_args()
    report = Report("fleet")
    parts = {
        "start": lambda: measure_start(report, arguments),
        "load": lambda: measure_load(report, arguments),
        "formats": lambda: measure_formats(report, arguments),
        "guesses": lambda: measure_guesses(report, arguments),
    }
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
