"""What guessed tokens gain beside none.

The questions are those of Spec-Bench (Xia et al., 2024: github.com/hemingkx/Spec-Bench, its question.jsonl): 13
categories, as JSON lines with `category` and `turns`. A fleet answers the first turn of some questions of each
category with speculation and without, in turns: 1, 8 and 32 at a time, greedy and at temperature 0.8. TPOT is the time
from the first token of an answer to its last, summed over the answers of a category, divided by the tokens behind the
first.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.asking import Answer
from benchmarks.report import Line, Report
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

TIMEOUT_S = 300.0
NUM_OUTPUT = 128
MAX_QUESTION_CHARS = 12_000
NUM_QUESTIONS = 8  # of each category
GAINING = ("summarization", "rag")  # these have a goal of their own
MOST_TPOT, MOST_GAINING_TPOT = 1.05, 0.75
LEVELS = (1, 8, 32)  # requests at a time
TEMPERATURES = (0.0, 0.8)


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
    found = await Answer().receive(client, request, TIMEOUT_S)
    assert found.finished is not None, found.error
    usage = found.finished.usage
    sums.drafts += usage.drafted_tokens
    sums.right_drafts += usage.accepted_drafts
    sums.seconds += found.times[-1] - found.times[0]
    sums.tokens += len(found.times) - 1


async def answer_all(
    client: AsyncClient, requests: list[tuple[inference_pb2.GenerateRequest, Sums]], level: int
) -> None:
    """`level` at a time."""
    waiting = iter(requests)

    async def one_after_another() -> None:
        for request, sums in waiting:
            await answer(client, request, sums)

    await asyncio.gather(*(one_after_another() for _ in range(level)))


async def categories(report: Report, client: AsyncClient, questions: dict[str, list[str]], repeats: int) -> None:
    """At one level all categories are answered together above 1 at a time, as a server has them."""
    for level in LEVELS:
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


def read_questions(path: Path) -> dict[str, list[str]]:
    """By category."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        text = question["turns"][0]
        if len(text) <= MAX_QUESTION_CHARS and len(found[question["category"]]) < NUM_QUESTIONS:
            found[question["category"]].append(text)
    return dict(found)


async def measure(report: Report, address: str, questions: dict[str, list[str]], repeats: int) -> None:
    async with AsyncClient(address) as client:
        for texts in questions.values():
            await answer(client, request_of(texts[0], 0.0, 0, True), Sums())
        await categories(report, client, questions, repeats)
