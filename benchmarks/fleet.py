"""A fleet as a user starts it: `make bench`, with PARTS="..." for other parts.

    start     from the command to the first token; memory
    load      TTFT, TPOT and tokens/s of clients that ask one question after another
    formats   what a JSON schema costs beside none: both write 64 tokens, each schema is another one (3 minutes)
    guesses   what guessed tokens gain beside none: QUESTIONS=question.jsonl, Spec-Bench's (30 minutes)

Each part starts a fleet of its own by `tandem serve` and talks to it over the public gRPC API. Within a part the
compared requests go to the same fleet, in turns, and differ in the compared field alone. Prompts of `load` share no
prefix, so nothing comes from a cache. TTFT runs from the send to the first token; TPOT = (last - first) / (n - 1), for
a category of questions the sum over its answers. Memory is the proportional set size: processes that share a page count
it in parts.

The questions are those of Spec-Bench (Xia et al., 2024: github.com/hemingkx/Spec-Bench, its question.jsonl): 13
categories, as JSON lines with `category` and `turns`. The first turns of some are answered 1, 8 and 32 at a time,
greedy and at temperature 0.8.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.asking import Answer, random_prompts, request_of, whole
from benchmarks.engine.figures import WEIGHT_BYTES, num_weights
from benchmarks.report import Line, Report, parser_of, run_parts
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model
from tandem_client import AsyncClient
from tandem_client.stubs.inference_pb2 import GenerateRequest
from tests.support.child_processes import tandem

PORT = 50651
ADDRESS = f"127.0.0.1:{PORT}"
MODEL = "smollm2-135m"
SMALL_POOL = ("--kv-memory-mb", str(EngineConfig().host_kv_memory_mb))
SETTLE_S = 1.0
MOST_OVERHEAD_MB = 500  # of a worker, beside weights and pool
SHORT_PROMPT = 16  # tokens, of the first question after a start
NUM_WORKERS = 2  # one of each role
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 32
LEVELS, NUM_REQUESTS = (1, 4), 4  # clients at one time; requests of each client in a repeat
MB = 1 << 20
FORMATTED_PROMPT = "Some facts about a town, its people, its streets and its trade, as JSON."
FORMATTED_LEVELS, FORMATTED_TOKENS = (1, 32), 64
MAX_QUESTION_CHARS, NUM_QUESTIONS = 12_000, 8  # of each category
GAINING = ("summarization", "rag")  # these have a goal of their own
MOST_TPOT, MOST_GAINING_TPOT = 1.05, 0.75
QUESTION_LEVELS, QUESTION_TEMPERATURES, QUESTION_TOKENS = (1, 8, 32), (0.0, 0.8), 128

Part = Callable[[Report, int, AsyncClient], Coroutine[Any, Any, None]]


async def ask(client: AsyncClient, request: GenerateRequest) -> Answer:
    """Raises `RuntimeError` where the answer has no end, `AssertionError` where it has too few tokens."""
    answer = whole(await Answer().receive(client, request))
    assert not request.stop.ignore_eos or len(answer.times) == request.stop.max_tokens
    return answer


def random_request(seed: int, prompt_tokens: int, output_tokens: int) -> GenerateRequest:
    (prompt,) = random_prompts(1, prompt_tokens, seed)
    return request_of(prompt, output_tokens)


async def asked(part: Part, report: Report, repeats: int) -> None:
    async with AsyncClient(ADDRESS) as client:
        await part(report, repeats, client)


def measure(part: Part, flags: Sequence[str], report: Report, repeats: int) -> None:
    with tandem(PORT, "--model", MODEL, *flags):
        asyncio.run(asked(part, report, repeats))


# ---- start


async def first_token(_: Report, __: int, client: AsyncClient) -> None:
    await ask(client, random_request(0, SHORT_PROMPT, 1))


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


def start(report: Report, repeats: int) -> None:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        with tandem(PORT, "--model", MODEL, *SMALL_POOL) as pid:
            asyncio.run(asked(first_token, report, repeats))
            seconds.append(time.perf_counter() - begun)
            sizes = settled_sizes(pid) if len(seconds) == repeats else []
    report.add(Line("tandem serve: command to first token", statistics.median(seconds), "s"))
    # The workers are the largest processes. The goal: weights once, the KV pool, and 500 MB.
    weight_bytes = sum(num_weights(load_config(resolve_model(MODEL)))) * WEIGHT_BYTES
    most = weight_bytes / MB + EngineConfig().host_kv_memory_mb + MOST_OVERHEAD_MB
    report.add(Line("resident memory of the largest worker", sizes[0] / MB, "MB", most=round(most)))
    report.add(Line("resident memory of Ray, supervisor, router and driver", sum(sizes[NUM_WORKERS:]) / MB, "MB"))


# ---- load


async def load(report: Report, repeats: int, client: AsyncClient) -> None:
    """Each repeat has every level of concurrency in turn."""
    report.say(f"{MODEL}, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, one worker of each role")
    answers: defaultdict[int, list[Answer]] = defaultdict(list)
    tokens_per_s: defaultdict[int, list[float]] = defaultdict(list)

    async def one_client(seed: int) -> list[Answer]:
        seeds = range(seed * 100, seed * 100 + NUM_REQUESTS)
        return [await ask(client, random_request(number, PROMPT_TOKENS, OUTPUT_TOKENS)) for number in seeds]

    await ask(client, random_request(0, PROMPT_TOKENS, 4))  # connects the workers
    for repeat, level in itertools.product(range(repeats), LEVELS):
        begun = time.perf_counter()
        seeds = [(repeat * 100 + level) * 1000 + index for index in range(level)]
        found = [answer for of_one in await asyncio.gather(*map(one_client, seeds)) for answer in of_one]
        tokens_per_s[level].append(len(found) * OUTPUT_TOKENS / (time.perf_counter() - begun))
        answers[level] += found
    for level in LEVELS:
        clients = f"{level} client{'s' if level > 1 else ''}"
        for word, times in zip(("TTFT", "TPOT"), times_ms(answers[level]), strict=True):
            report.add(Line(f"{clients}: {word}, median", statistics.median(times), "ms"))
            report.add(Line(f"{clients}: {word}, worst", max(times), "ms"))
        report.add(Line(f"{clients}: tokens of all together", statistics.median(tokens_per_s[level]), "tokens/s"))


def times_ms(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """TTFT and TPOT of each."""
    return [answer.times[0] * 1e3 for answer in answers], [(answer.tpot_s or 0.0) * 1e3 for answer in answers]


# ---- formats


def long_schema(number: int) -> dict[str, Any]:
    """Nested objects, and a list of texts that is longer than the output."""
    return {
        "type": "object",
        "properties": {
            f"kind_{number}": {"enum": ["town", "village", "city"]},
            "place": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}},
                      "required": ["name"], "additionalProperties": False},
            "facts": {"type": "array", "items": {"type": "string"}, "minItems": 60},
        },
        "required": [f"kind_{number}", "place", "facts"],
        "additionalProperties": False,
    }  # fmt: skip


async def formats(report: Report, repeats: int, client: AsyncClient) -> None:
    answers: defaultdict[tuple[int, bool], list[Answer]] = defaultdict(list)

    def request(with_schema: bool, seed: int, number: int) -> GenerateRequest:
        found = GenerateRequest(text=f"{number}. {FORMATTED_PROMPT}")
        found.sampling.temperature, found.sampling.seed = 1.0, seed
        found.stop.max_tokens, found.stop.ignore_eos = FORMATTED_TOKENS, not with_schema
        if with_schema:
            found.output_format.json_schema = json.dumps(long_schema(number))
        return found

    kinds = itertools.product(range(repeats + 1), FORMATTED_LEVELS, (True, False))
    for repeat, level, with_schema in kinds:
        requests = [request(with_schema, repeat, number) for number in range(level)]
        found = await ask_all(client, requests, level)
        assert all(len(answer.times) == FORMATTED_TOKENS for answer in found)
        if repeat:  # the first one compiles the grammars
            answers[level, with_schema] += found
    for level in FORMATTED_LEVELS:
        (ttft, tpot), (plain_ttft, plain_tpot) = (
            map(statistics.median, times_ms(answers[level, kind])) for kind in (True, False)
        )
        at = f"{level} at a time"
        report.add(Line(f"{at}: TPOT with a schema each", tpot, "ms", "no schema", plain_tpot, least_ratio=0.95))
        report.add(Line(f"{at}: TTFT with a schema each", ttft, "ms", "no schema", plain_ttft))
        report.add(Line(f"{at}: TTFT that a schema adds", ttft - plain_ttft, "ms", most=5.0))


# ---- guesses


async def ask_all(client: AsyncClient, requests: Sequence[GenerateRequest], level: int) -> list[Answer]:
    """`level` at a time."""
    waiting, answers = iter(requests), list[Answer]()

    async def one_after_another() -> None:
        for request in waiting:
            answers.append(await ask(client, request))

    await asyncio.gather(*(one_after_another() for _ in range(level)))
    return answers


def sums_of(answers: Sequence[Answer]) -> tuple[float, str]:
    """TPOT in milliseconds, over all tokens, and what was drafted."""
    tokens = max(1, sum(answer.num_tokens - 1 for answer in answers))
    tpot_ms = 1e3 * sum(answer.times[-1] - answer.times[0] for answer in answers) / tokens
    drafts = sum(answer.finished.usage.drafted_tokens for answer in answers)
    share = sum(answer.finished.usage.accepted_drafts for answer in answers) / drafts if drafts else 0.0
    return tpot_ms, f"{drafts / tokens:.2f} drafts a token, {share:.0%} right"


async def guesses(questions: dict[str, list[str]], report: Report, repeats: int, client: AsyncClient) -> None:
    def request(text: str, temperature: float, seed: int, speculation: bool) -> GenerateRequest:
        found = request_of(text, QUESTION_TOKENS, temperature, ignore_eos=False, speculation=speculation)
        found.sampling.seed = seed
        return found

    for texts in questions.values():
        await ask(client, request(texts[0], 0.0, 0, True))
    for level, temperature in itertools.product(QUESTION_LEVELS, QUESTION_TEMPERATURES):
        answers: defaultdict[tuple[str, bool], list[Answer]] = defaultdict(list)
        for repeat, (category, texts) in itertools.product(range(repeats), questions.items()):
            copies = -(-level // len(texts))  # each with another seed, so that `level` are under way
            for speculation in (True, False) if repeat % 2 else (False, True):
                calls = [
                    request(text, temperature, 100 * repeat + copy, speculation)
                    for copy in range(copies)
                    for text in texts
                ]
                answers[category, speculation] += await ask_all(client, calls, level)
        for category in questions:
            (on_ms, drafts), (off_ms, _) = (sums_of(answers[category, speculation]) for speculation in (True, False))
            most = MOST_GAINING_TPOT if level == 1 and category in GAINING else MOST_TPOT
            name = f"{level} at a time, temperature {temperature:g}: {category} ({drafts})"
            report.add(Line(name, on_ms, "ms", "without", off_ms, least_ratio=round(1 / most, 3)))


def read_questions(path: Path) -> dict[str, list[str]]:
    """By category."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        text = question["turns"][0]
        if len(text) <= MAX_QUESTION_CHARS and len(found[question["category"]]) < NUM_QUESTIONS:
            found[question["category"]].append(text)
    return dict(found)


def main() -> None:
    parser = parser_of(__doc__, ("start", "load", "formats", "guesses"), repeats=3)
    parser.set_defaults(parts=["start", "load"])
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl (github.com/hemingkx/Spec-Bench)")
    arguments = parser.parse_args()
    report, repeats = Report("fleet"), arguments.repeats
    parts = {
        "start": partial(start, report, repeats),
        "load": partial(measure, load, SMALL_POOL, report, repeats),
        "formats": partial(measure, formats, (), report, repeats),
        "guesses": partial(
            report.say, "the gain of guesses needs questions, and is left out: --questions question.jsonl"
        ),
    }
    if arguments.questions is not None:
        asking = partial(guesses, read_questions(arguments.questions))
        parts["guesses"] = partial(measure, asking, (), report, repeats)
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
