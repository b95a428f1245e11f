"""How long a prompt of 32,000 tokens holds up the router's event loop: `python -m benchmarks.tokenizing`, 20 seconds.

A task on the loop sleeps for 1 ms at a time, as a stream does between two tokens. Meanwhile the loop parses a message
with a long prompt and validates it in `ValidationThreads`, with the tokenizer of SmolLM2. A gap is the time between two
turns of the task, and the figure is the longest one, beside the longest one without a prompt.
"""

from __future__ import annotations

import argparse
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
from router.serving.validation import prepare
from router.serving.validation_threads import ValidationThreads
from tandem_client.stubs.inference_pb2 import GenerateRequest, TokenIds
from text.tokenizer import ModelTokenizer, load_tokenizer

MODEL = "smollm2-135m"
NUM_TOKENS = 32_000
CONTEXT = 131_072
NUM_TURNS = 30
SLEEP_S = 0.001
IDLE_S = 0.1  # about the time of one validation
MAX_GAP_MS = 5.0
ROOT = Path(__file__).parents[1]

Validate = Callable[[], Awaitable[object]]


def lines(repeats: int = 15) -> list[Line]:
    """Medians over the repeats, in which the kinds of prompts take turns."""
    fetch(MODEL)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.info = replace(tokenizer.info, context_length=CONTEXT)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in every process of a fleet
    try:
        return uvloop.run(_measure(tokenizer, repeats))
    finally:
        sys.setswitchinterval(interval)


async def _measure(tokenizer: ModelTokenizer, repeats: int) -> list[Line]:
    pool = ValidationThreads(max_pending=1)
    cpu_s: dict[str, list[float]] = {}
    prompts = _prompts(tokenizer)
    gaps: dict[str, list[float]] = {name: [] for name in ("", *prompts)}
    for _ in range(repeats):
        gaps[""].append(await _longest_gap(partial(asyncio.sleep, IDLE_S)))
        for name, messages in prompts.items():
            message = next(messages)
            validate = partial(_validate, pool, tokenizer, message, cpu_s.setdefault(name, []))
            gaps[name].append(await _longest_gap(validate))
    pool.close()
    idle_ms = statistics.median(gaps.pop("")) * 1e3
    found = [Line("longest gap of the loop beside no prompt", idle_ms, "ms")]
    for name, values in gaps.items():
        added_ms = max(0.0, statistics.median(values) * 1e3 - idle_ms)
        measure = f"{NUM_TOKENS:,} tokens of {name}"
        found.append(Line(f"gap that {measure} add", added_ms, "ms", most=MAX_GAP_MS))
        found.append(Line(f"CPU time of a thread for {measure}", statistics.median(cpu_s[name]) * 1e3, "ms"))
    return found


async def _validate(pool: ValidationThreads, tokenizer: ModelTokenizer, message: bytes, cpu_s: list[float]) -> None:
    request = GenerateRequest.FromString(message)  # on the loop, as gRPC does

    def timed() -> None:
        started_at = time.thread_time()
        generation = prepare(request, tokenizer, RouterConfig(), "id", lambda: 0, None)
        cpu_s.append(time.thread_time() - started_at)
        assert generation.choices[0].num_prompt_tokens > NUM_TOKENS * 0.9

    await pool.run(60.0, len(message), timed)


async def _longest_gap(work: Validate) -> float:
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


def _prompts(tokenizer: ModelTokenizer) -> dict[str, Iterator[bytes]]:
    """Kind -> serialized requests without end. The cache knows no part of a prompt, but for "the next turn"."""
    text = _text_of(tokenizer, NUM_TOKENS)
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


def _text_of(tokenizer: ModelTokenizer, num_tokens: int) -> str:
    """Prose and code of this repository."""
    files = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("core/*.py")), *sorted(ROOT.glob("router/*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in files).replace("<|", "<")  # no special token
    num_chars = len(text) * num_tokens // len(tokenizer.encode(text))
    assert num_chars <= len(text)
    return text[:num_chars]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    report = Report("tokenizing")
    for line in lines(parser.parse_args().repeats):
        report.add(line)
    report.write()


if __name__ == "__main__":
    main()
