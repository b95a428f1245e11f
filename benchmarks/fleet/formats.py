"""What a JSON schema costs.

A fleet answers the same prompts with a schema and without, in turns: one client, then 32 at a time, each with a schema
of its own. Both write 64 tokens: the schemas ask for more text. TTFT runs from the client's send to the first token;
TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks.asking import Answer
from benchmarks.report import Line, Report
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

TIMEOUT_S = 300.0
NUM_OUTPUT = 64
PROMPT = "Some facts about a town, its people, its streets and its trade, as JSON."
LEVELS = (1, 32)


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


async def ask(client: AsyncClient, with_schema: bool, seed: int, number: int) -> Answer:
    request = inference_pb2.GenerateRequest(text=f"{number}. {PROMPT}")
    request.sampling.temperature, request.sampling.seed = 1.0, seed
    request.stop.max_tokens = NUM_OUTPUT
    if with_schema:
        request.output_format.json_schema = json.dumps(long_schema(number))
    else:
        request.stop.ignore_eos = True
    answer = await Answer().receive(client, request, TIMEOUT_S, time.perf_counter())
    assert len(answer.times) == NUM_OUTPUT, f"{len(answer.times)} tokens {answer.error}"
    return answer


async def measure(report: Report, address: str, repeats: int) -> None:
    answers: defaultdict[tuple[int, bool], list[Answer]] = defaultdict(list)
    async with AsyncClient(address) as client:
        for repeat in range(repeats + 1):  # the first one compiles the grammars
            for level, with_schema in itertools.product(LEVELS, (True, False)):
                found = await asyncio.gather(*(ask(client, with_schema, repeat, number) for number in range(level)))
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
