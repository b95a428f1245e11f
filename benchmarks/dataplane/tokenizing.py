"""How long a prompt of 32,000 tokens holds up the router's event loop.

A task on the loop sleeps for 1 ms at a time, as a stream does between two tokens. Meanwhile the loop parses a message
with a long prompt and validates it in `ValidationThreads`, with the tokenizer of SmolLM2. A gap is the time between two
turns of the task, and the figure is the longest one, beside the longest one without a prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.report import Line, Report
from core.config import RouterConfig
from fleet.service_host import SWITCH_INTERVAL_S
from model_files.catalogue import fetch
from router.serving.output_formats import RequestGrammars
from router.serving.validation import prepare
from runtime.validation_threads import ValidationThreads
from tandem_client.stubs.inference_pb2 import GenerateRequest, TokenIds
from text.tokenizer import ModelTokenizer, load_tokenizer

MODEL = "smollm2-135m"
NUM_TOKENS = 32_000
CONTEXT = 131_072
NUM_TURNS = 30  # of the chat
SLEEP_S = 0.001
IDLE_S = 0.1  # about the time of one validation
MAX_GAP_MS = 5.0
REPEATS = 15
ROOT = Path(__file__).parents[2]


def measure(report: Report, _: int) -> None:
    """Medians of `REPEATS`, in which the kinds of prompts take turns."""
    fetch(MODEL)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.info = replace(tokenizer.info, context_length=CONTEXT)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in every process of a fleet
    try:
        gaps = uvloop.run(gaps_of_prompts(tokenizer))
    finally:
        sys.setswitchinterval(interval)
    idle_ms = gaps.pop("") * 1e3
    report.add(Line("longest gap of the loop beside no prompt", idle_ms, "ms"))
    for name, gap_s in gaps.items():
        added_ms = max(0.0, gap_s * 1e3 - idle_ms)
        report.add(Line(f"gap that {NUM_TOKENS:,} tokens of {name} add", added_ms, "ms", most=MAX_GAP_MS))


async def gaps_of_prompts(tokenizer: ModelTokenizer) -> dict[str, float]:
    """Kind of prompt -> seconds of the longest gap; "" = no prompt."""
    pool, prompts, grammars = ValidationThreads(max_pending=1), prompts_of(tokenizer), RequestGrammars(tokenizer)
    gaps: dict[str, list[float]] = {name: [] for name in ("", *prompts)}
    for _ in range(REPEATS):
        gaps[""].append(await longest_gap(partial(asyncio.sleep, IDLE_S)))
        for name, messages in prompts.items():
            gaps[name].append(await longest_gap(partial(validate, pool, tokenizer, grammars, next(messages))))
    pool.close()
    return {name: statistics.median(values) for name, values in gaps.items()}


async def validate(
    pool: ValidationThreads, tokenizer: ModelTokenizer, grammars: RequestGrammars, message: bytes
) -> None:
    request = GenerateRequest.FromString(message)  # on the loop, as gRPC does

    def prepared() -> None:
        generation = prepare(request, tokenizer, RouterConfig(), "id", lambda: 0, (), grammars)
        assert generation.choices[0].num_prompt_tokens > NUM_TOKENS * 0.9

    await pool.run("", 60.0, len(message), prepared)


async def longest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds between two turns of a task that sleeps for `SLEEP_S`, at most, while `work` is done."""
    turns = [time.perf_counter()]
    done = asyncio.Event()

    async def take_turns() -> None:
        while not done.is_set():
            await asyncio.sleep(SLEEP_S)
            turns.append(time.perf_counter())

    task = asyncio.create_task(take_turns())
    await asyncio.sleep(5 * SLEEP_S)
    await work()
    done.set()
    await task
    return max(after - before for before, after in itertools.pairwise(turns))


def prompts_of(tokenizer: ModelTokenizer) -> dict[str, Iterator[bytes]]:
    """Kind -> serialized requests without end. The cache knows no part of a prompt, but for "the next turn"."""
    text = text_of(tokenizer, NUM_TOKENS)
    turn = len(text) // NUM_TURNS
    chat = GenerateRequest()
    chat.chat.messages.add(role="system", content="You are a helpful assistant.")
    for number in range(NUM_TURNS):
        role = ("user", "assistant")[number % 2]
        chat.chat.messages.add(role=role, content=text[number * turn : (number + 1) * turn])

    def with_new_salts() -> Iterator[bytes]:
        for number in itertools.count():
            chat.cache_salt = str(number)
            yield chat.SerializeToString()

    def with_the_same_salt() -> Iterator[bytes]:
        tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in chat.chat.messages])
        chat.cache_salt = ""
        return itertools.repeat(chat.SerializeToString())

    ids = GenerateRequest(token_ids=TokenIds(ids=tokenizer.encode(text)))
    return {
        "text": itertools.repeat(GenerateRequest(text=text).SerializeToString()),
        "chat": with_new_salts(),
        "chat, all but its last turn known": with_the_same_salt(),
        "token ids": itertools.repeat(ids.SerializeToString()),
    }


def text_of(tokenizer: ModelTokenizer, num_tokens: int) -> str:
    """Prose and code of this repository."""
    files = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("core/*.py")), *sorted(ROOT.glob("router/*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in files).replace("<|", "<")  # no special token
    num_chars = len(text) * num_tokens // len(tokenizer.encode(text))
    assert num_chars <= len(text)
    return text[:num_chars]
