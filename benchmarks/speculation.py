"""What guessed tokens gain: `make bench-speculation QUESTIONS=question.jsonl`.

The questions are those of Spec-Bench (Xia et al., 2024: github.com/hemingkx/Spec-Bench, its question.jsonl): 13
categories, as JSON lines with `category` and `turns`. A fleet answers the first turn of some questions of each
category with speculation and without, in turns: 1, 8 and 32 at a time, greedy and at temperature 0.8. TPOT is the time
from the first token of an answer to its last, summed over the answers of a category, divided by the tokens behind the
first. Then 20 nested JSON schemas show how many steps an output takes that its grammar forces in part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import serving
from benchmarks.report import Line, Report
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

ADDRESS = "127.0.0.1:50654"
TIMEOUT_S = 300.0
NUM_OUTPUT = 128
MAX_QUESTION_CHARS = 12_000
GAINING = ("summarization", "rag")  # these have a goal of their own
MOST_TPOT, MOST_GAINING_TPOT = 1.05, 0.75
TEMPERATURES = (0.0, 0.8)


_TEXT = {"type": "string", "maxLength": 20}


def _object(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def nested_schema(number: int) -> dict[str, object]:
    """An order, as a shop would ask for it."""
    item = _object(product=_TEXT, quantity={"type": "integer"}, **{f"price_{number}": {"type": "number"}})
    address = _object(street=_TEXT, city=_TEXT, country={"enum": ["France", "Italy", "Spain"]})
    customer = _object(name=_TEXT, is_business={"type": "boolean"}, delivery_address=address)
    return _object(customer=customer, ordered_items={"type": "array", "items": item, "minItems": 2, "maxItems": 3})


@dataclass(slots=True)
class Sums:
    seconds: float = 0.0
    tokens: int = 0  # behind the first ones
    drafts: int = 0
    right_drafts: int = 0

    @property
    def tpot_ms(self) -> float:
        return 1e3 * self.seconds / max(self.tokens, 1)


def request_of(text: str, temperature: float, seed: int, speculation: bool) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(speculation=speculation)
    request.chat.messages.add(role="user", content=text)
    request.sampling.temperature, request.sampling.seed = temperature, seed
    request.stop.max_tokens = NUM_OUTPUT
    return request


async def answer(client: AsyncClient, request: inference_pb2.GenerateRequest, sums: Sums) -> None:
    times: list[float] = []
    async for response in client.generate(request, TIMEOUT_S):
        if response.HasField("tokens"):
            times += [time.perf_counter()] * len(response.tokens.token_ids)
        else:
            sums.drafts += response.finished.usage.drafted_tokens
            sums.right_drafts += response.finished.usage.accepted_drafts
    sums.seconds += times[-1] - times[0]
    sums.tokens += len(times) - 1


async def answer_all(
    client: AsyncClient, requests: list[tuple[inference_pb2.GenerateRequest, Sums]], level: int
) -> None:
    """`level` at a time."""
    waiting = iter(requests)

    async def one_after_another() -> None:
        for request, sums in waiting:
            await answer(client, request, sums)

    await asyncio.gather(*(one_after_another() for _ in range(level)))


async def categories(
    report: Report, client: AsyncClient, questions: dict[str, list[str]], levels: list[int], repeats: int
) -> None:
    """At one level all categories are answered together above 1 at a time, as a server has them."""
    for level in levels:
        for temperature in TEMPERATURES:
            sums: defaultdict[tuple[str, bool], Sums] = defaultdict(Sums)
            for repeat in range(repeats):
                for category, texts in questions.items():
                    for speculation in (True, False) if repeat % 2 else (False, True):
                        of_kind = sums[category, speculation]
                        copies = -(-level // len(texts))  # each with another seed, so that `level` are under way
                        calls = [
                            (request_of(text, temperature, 100 * repeat + copy, speculation), of_kind)
                            for copy in range(copies)
                            for text in texts
                        ]
                        await answer_all(client, calls, level)
            for category in questions:
                on, off = sums[category, True], sums[category, False]
                most = MOST_GAINING_TPOT if level == 1 and category in GAINING else MOST_TPOT
                share = on.right_drafts / on.drafts if on.drafts else 0.0
                name = (
                    f"{level} at a time, temperature {temperature:g}: {category} "
                    f"({on.drafts / max(on.tokens, 1):.2f} drafts a token, {share:.0%} right)"
                )
                report.add(Line(name, on.tpot_ms, "ms", "without", off.tpot_ms, least_ratio=round(1 / most, 3)))


async def forced(report: Report, client: AsyncClient) -> None:
    tokens = steps = 0
    for number in range(20):
        request = request_of("Make up an order of some things for a school, as JSON.", 0.8, number, True)
        request.output_format.json_schema = json.dumps(nested_schema(number))
        async for response in client.generate(request, TIMEOUT_S):
            if response.HasField("finished"):
                usage = response.finished.usage
                tokens += usage.completion_tokens
                steps += usage.completion_tokens - usage.accepted_drafts
    report.add(Line("nested JSON schemas: steps per token", steps / tokens, "", most=0.8))


def read_questions(path: Path, num_questions: int) -> dict[str, list[str]]:
    """By category."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        text = question["turns"][0]
        if len(text) <= MAX_QUESTION_CHARS and len(found[question["category"]]) < num_questions:
            found[question["category"]].append(text)
    return dict(found)


async def measure(report: Report, arguments: argparse.Namespace) -> None:
    questions = read_questions(arguments.questions, arguments.num_questions)
    if arguments.only:
        questions = {category: questions[category] for category in arguments.only}
    async with AsyncClient(ADDRESS) as client:
        warm_up = {category: texts[:1] for category, texts in questions.items()}
        for texts in warm_up.values():
            await answer(client, request_of(texts[0], 0.0, 0, True), Sums())
        await categories(report, client, questions, arguments.levels, arguments.repeats)
        await forced(report, client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=2, help="of each category")
    parser.add_argument("--num-questions", type=int, default=8, help="of each category")
    parser.add_argument("--only", nargs="*", help="these categories")
    arguments = parser.parse_args()
    report = Report(f"speculation-{arguments.quantization}")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f'[engine]\nquantization = "{arguments.quantization}"\n')
        config.flush()
        command: list[str | Path] = [
            Path(sys.executable).with_name("tandem"), "serve", "--model", arguments.model, "--config", config.name,
            "--port", ADDRESS.rpartition(":")[2],
        ]  # fmt: skip
        with serving(command):
            asyncio.run(measure(report, arguments))
    report.write()


if __name__ == "__main__":
    main()
