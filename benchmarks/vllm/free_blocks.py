"""When the blocks of a prompt are free on a prefill worker with vLLM inside: after the read, and after a cancel.

vLLM tells the use of its pool with a step, so short requests go on beside the long one, and the router's view is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import count

from benchmarks.asking import ask, random_prompts
from benchmarks.processes import tandem
from benchmarks.report import Line, Report
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2

PORT = 18653
ADDRESS = f"127.0.0.1:{PORT}"
LEASE_S = 10.0
LONG_TOKENS, SHORT_TOKENS = 1500, 33
OUTPUT_TOKENS = 40
TIMEOUT_S = 300.0
LOOK_S = 0.02
SLACK_S = 5.0  # after the lease: the next step of a busy engine, and its report


def measure_free_blocks(report: Report) -> None:
    config = f"[vllm]\nlease_s = {LEASE_S}\n[router]\nlocal_prefill = 'never'\n"
    with tandem(PORT, "--engine", "vllm", "--kv-memory-mb", "1024", config=config):
        read_s, cancelled_s = asyncio.run(_measure())
    words = "until the blocks of a prompt are free on its prefill worker"
    report.add(Line(f"{words}, from the first token of the decode worker", read_s, "s", most=1.0))
    report.add(Line(f"{words}, from a cancel after the first token (lease {LEASE_S:g} s)", cancelled_s, "s",
                    most=LEASE_S + SLACK_S))  # fmt: skip


async def _measure() -> tuple[float, float]:
    async with AsyncClient(ADDRESS) as client, _short_requests(client):
        usual = max([await _held(client) for _ in range(100)])
        read_s, cancelled_s = [await _until_free(client, number, usual) for number in (2, 1)]
        return read_s, cancelled_s


async def _until_free(client: AsyncClient, num_tokens: int, usual: int) -> float:
    """Read `num_tokens` of an answer and cancel it: the first token is of the prefill worker, the second of the decode
    worker, which has the KV then."""
    [prompt] = random_prompts(1, LONG_TOKENS, seed=num_tokens)
    seen: list[int] = []

    async def look() -> None:
        while True:
            seen.append(await _held(client))

    looking = asyncio.create_task(look())
    try:
        async with client.stream(prompt, TIMEOUT_S, max_tokens=OUTPUT_TOKENS, ignore_eos=True) as stream:
            async for piece in stream:
                num_tokens -= len(piece.token_ids)
                if num_tokens <= 0:
                    break
        ended = time.perf_counter()
        assert max(seen) > usual, "nobody saw the blocks of the prompt"
    finally:
        looking.cancel()
    async with asyncio.timeout(LEASE_S + TIMEOUT_S):
        while await _held(client) > usual:
            pass
    return time.perf_counter() - ended


async def _held(client: AsyncClient) -> int:
    """Blocks of the prefill worker, as the router knows."""
    await asyncio.sleep(LOOK_S)
    [worker] = [w for w in (await client.fleet()).workers if w.role == worker_pb2.WORKER_ROLE_PREFILL]
    return int(worker.load.ledger.held)


@contextlib.asynccontextmanager
async def _short_requests(client: AsyncClient) -> AsyncIterator[None]:
    async def ask_on() -> None:
        for number in count(100):
            answer = await ask(client, random_prompts(1, SHORT_TOKENS, number)[0], 1, TIMEOUT_S, 0.0)
            assert not answer.error, answer.error

    asking = asyncio.create_task(ask_on())
    try:
        yield
        assert not asking.done(), "the short requests have ended"
    finally:
        asking.cancel()
