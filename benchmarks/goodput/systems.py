"""The measured systems: fleets of Tandem, and vLLM's engine. Each takes requests at their times of arrival.

A system is started for one repeat and serves all its rows. Prompts of one row never hit the cache of another row.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.asking import FIRST_WORD_ID, LAST_WORD_ID, Answer, ask, ask_at
from benchmarks.engine import programs
from simulator.replay.trace import TraceRequest
from tandem_client import AsyncClient
from tests.support.child_processes import ChildProcess, tandem

PORT = 18651
ADDRESS = f"127.0.0.1:{PORT}"
CORES = "0-1"
KV_MEMORY_MB = 1024  # of each worker


@dataclass(frozen=True, slots=True)
class Row:
    """Requests with rising times of arrival. A request without its last token after `timeout_s` has failed."""

    requests: Sequence[TraceRequest]
    timeout_s: float  # from the first arrival


class System(Protocol):
    def serve(self, row: Row) -> list[Answer]:
        """The times of the answers are on the clock of the arrivals."""


def prompt_of(request: TraceRequest) -> list[int]:
    """Equal hash ids become equal tokens, different ones most likely different tokens."""
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        words = random.Random(hash_id)
        tokens += [words.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(request.tokens_per_hash_id)]
    return tokens[: request.num_tokens]


class Fleet:
    """A fleet that serves at ADDRESS."""

    def __init__(self) -> None:
        self._num_rows = 0

    def serve(self, row: Row) -> list[Answer]:
        self._num_rows += 1
        return asyncio.run(self._ask_all(row, salt=f"row {self._num_rows}"))

    async def _ask_all(self, row: Row, salt: str) -> list[Answer]:
        prompts = [prompt_of(request) for request in row.requests]

        async def one(number: int, start: float) -> Answer:
            request = row.requests[number]
            timeout_s = row.timeout_s - request.arrives_at
            return await ask(client, prompts[number], request.num_output_tokens, timeout_s, start, salt)

        async with AsyncClient(ADDRESS) as client:
            return await ask_at([request.arrives_at for request in row.requests], one)


@contextlib.contextmanager
def fleet(flags: Sequence[str], config: str = "") -> Iterator[Fleet]:
    """`tandem serve` with these flags, from its ready line to its end. Raises `RuntimeError` if it does not start."""
    with tandem(PORT, "--kv-memory-mb", str(KV_MEMORY_MB), *flags, config=config):
        yield Fleet()


class VllmEngine:
    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    def serve(self, row: Row) -> list[Answer]:
        requests = [
            {"at": request.arrives_at, "prompt": prompt_of(request), "max_tokens": request.num_output_tokens}
            for request in row.requests
        ]
        return [
            Answer(times, len(times))
            for times in self._process.call("serve", requests=requests, timeout_s=row.timeout_s)
        ]


@contextlib.contextmanager
def vllm() -> Iterator[VllmEngine]:
    """vLLM on both cores, with its defaults. Raises `RuntimeError` if it is not installed, `ChildEnded` if it ends."""
    start = programs.serving_vllm(CORES)
    if start is None:
        raise RuntimeError("vLLM is not installed: run `make bench-peers`")
    process = start(None)
    try:
        process.wait_until_ready()
        yield VllmEngine(process)
    finally:
        process.stop()
