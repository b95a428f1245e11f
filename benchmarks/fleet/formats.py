"""What an output format costs, and whether the outputs have it.

A fleet answers the same prompts with a JSON schema and without, in turns: one client, then 32 at a time, each with a
schema of its own. Both write 64 tokens: the schemas ask for more text. TTFT runs from the client's send to the first
token; TPOT = (last - first) / (n - 1). Then 20 schemas are asked for with many seeds at temperature 1, of this model
and of one with random weights: every output that ends by itself is validated, and one that is cut must have followed
its grammar to its last token.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import jsonschema

from benchmarks.asking import Answer
from benchmarks.report import Line, Report
from router.serving.output_formats import RequestGrammars
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2
from text.grammars import GrammarReader
from text.tokenizer import load_tokenizer

TIMEOUT_S = 300.0
NUM_OUTPUT = 64
MAX_TOKENS = 160  # of the outputs that are validated
PROMPT = "Some facts about a town, its people, its streets and its trade, as JSON."
LEVELS = (1, 32)
RANDOM_MODEL = "random:smollm2-135m"


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


_PARTS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 20},
    {"type": "integer", "minimum": -5, "maximum": 1000},
    {"enum": ["red", "green", 3, None, True]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                                  "additionalProperties": False}]},
]  # fmt: skip


def short_schema(number: int) -> dict[str, Any]:
    """One of twenty, of one to four properties."""
    chosen = [_PARTS[(number + step * (1 + number // 6)) % len(_PARTS)] for step in range(1 + number % 4)]
    properties = {f"p{index}_{number}": part for index, part in enumerate(chosen)}
    return {"type": "object", "properties": properties, "required": list(properties)[: 1 + number % 3],
            "additionalProperties": False}  # fmt: skip


def request_of(schema: dict[str, Any] | None, seed: int, number: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=f"{number}. {PROMPT}")
    request.sampling.temperature, request.sampling.seed = 1.0, seed
    request.stop.max_tokens = max_tokens
    if schema is None:
        request.stop.ignore_eos = True
    else:
        request.output_format.json_schema = json.dumps(schema)
    return request


async def timed(client: AsyncClient, request: inference_pb2.GenerateRequest) -> Answer:
    answer = await Answer().receive(client, request, TIMEOUT_S, time.perf_counter())
    assert len(answer.times) == NUM_OUTPUT, f"{len(answer.times)} tokens {answer.error}"
    return answer


async def cost(report: Report, client: AsyncClient, repeats: int) -> None:
    answers: defaultdict[tuple[int, bool], list[Answer]] = defaultdict(list)
    for repeat in range(repeats + 1):  # the first one compiles the grammars
        for level in LEVELS:
            for with_schema in (True, False):
                calls = [
                    request_of(long_schema(number) if with_schema else None, repeat, number, NUM_OUTPUT)
                    for number in range(level)
                ]
                found = await asyncio.gather(*(timed(client, call) for call in calls))
                if repeat:
                    answers[level, with_schema] += found
    for level in LEVELS:
        ttft, tpot = (
            [statistics.median(measure(answer) for answer in answers[level, kind]) * 1e3 for kind in (True, False)]
            for measure in (lambda answer: answer.times[0], lambda answer: statistics.fmean(answer.gaps))
        )
        at = f"{level} at a time"
        report.add(Line(f"{at}: TPOT with a schema each", tpot[0], "ms", "no schema", tpot[1], least_ratio=0.95))
        report.add(Line(f"{at}: TTFT with a schema each", ttft[0], "ms", "no schema", ttft[1]))
        report.add(Line(f"{at}: TTFT that a schema adds", ttft[0] - ttft[1], "ms", most=5.0))


async def validity(report: Report, client: AsyncClient, model: str, num_seeds: int) -> None:
    ends: Counter[str] = Counter()
    tokenizer = load_tokenizer(model)
    grammars, reader = RequestGrammars(tokenizer), GrammarReader(lambda: tokenizer)

    async def one(number: int, seed: int) -> None:
        schema = short_schema(number)
        request = request_of(schema, seed, number, MAX_TOKENS)
        answer = await Answer().receive(client, request, TIMEOUT_S)
        assert answer.finished is not None, answer.error
        what = f"schema {number}, seed {seed}: {answer.text!r}"
        if answer.finished.finish_reason == inference_pb2.FINISH_REASON_STOP:
            try:
                jsonschema.validate(json.loads(answer.text), schema)
                ends["valid"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                ends["invalid"] += 1
                report.say(f"{what}: {error}")
        elif reader.num_accepted(grammars.grammar_of(request), answer.token_ids) == len(answer.token_ids):
            ends["cut"] += 1
        else:
            ends["wrong prefix"] += 1
            report.say(f"{what} is no start of an output")

    for seed in range(num_seeds):
        await asyncio.gather(*(one(number, seed) for number in range(20)))
    report.add(Line(f"{model}: outputs that ended by themselves and follow their schema", ends["valid"], "outputs"))
    report.add(Line(f"{model}: outputs that ended by themselves and do not", ends["invalid"], "outputs", most=0))
    report.add(Line(f"{model}: outputs cut at {MAX_TOKENS} tokens that may go on", ends["cut"], "outputs"))
    report.add(Line(f"{model}: outputs cut that are no start of one", ends["wrong prefix"], "outputs", most=0))


async def measure(report: Report, address: str, model: str, repeats: int, num_seeds: int) -> None:
    """`repeats`: 0 = without the cost."""
    async with AsyncClient(address) as client:
        if repeats:
            await cost(report, client, repeats)
        await validity(report, client, model, num_seeds)
