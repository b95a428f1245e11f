"""What clients feel when running requests move between decode workers, and when a worker or a router dies.

Real processes on this machine (tests/support/processes.py): routers, prefill and decode workers, nixl. A step takes a
fixed time, so the gaps are those of the moves and not of a CPU that computes two models.

    gap      a worker drains under streams of 256, 2,048 and 8,000 tokens. The added gap of a stream is its longest time
             without a token less two median ones: the old worker's last step, and the new one's first
    drain    a worker with 32 streams of 2,048 tokens drains: by moves, by waiting for their ends. Or it is killed
    router   one of two routers is killed under 64 streams
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from benchmarks.asking import Answer, random_prompts, streams
from benchmarks.report import Line, Report, percentile
from core.config import from_mapping
from tandem_client import AsyncClient
from tests.support.processes import Fleet
from tests.support.service_process import BLOCK_SIZE, MOVING

LENGTHS = (256, 2048, 8000)
STREAMS_PER_GAP = 4
DRAINED_STREAMS, DRAINED_TOKENS = 32, 2048
MOST_ADDED_MS, MOST_ADDED_P99_MS = 15.0, 60.0
MOST_DRAIN_S = 3.0
MOST_ROUTER_GAP_S = 2.0
SLEEPS = {"prefill": {"step_s": 0.002, "num_blocks": 6144}, "decode": {"step_s": 0.02, "num_blocks": 6144}}


@contextlib.asynccontextmanager
async def fleet(num_decode: int = 1, num_routers: int = 1) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    sizes = {"router": num_routers, "prefill": 1, "decode": num_decode}
    async with Fleet.start(from_mapping(MOVING), sizes, sleeps=SLEEPS, watched=False) as running:
        async with AsyncClient([router.address for router in running.pool("router")]) as client:
            yield running, client


def gaps_of(answer: Answer, since: float, until: float = math.inf) -> list[float]:
    """Those that ended after `since`, when the part began to disturb the streams, and before `until`."""
    return [gap for gap, ended in zip(answer.gaps, answer.times[1:], strict=True) if since < ended < until]


def failures(found: Sequence[Answer]) -> float:
    return float(sum(bool(answer.error) for answer in found))


def recomputed(found: Sequence[Answer]) -> float:
    return float(sum(answer.finished.recomputed_tokens for answer in found))


# ---- parts


async def gap(report: Report, repeats: int) -> None:
    """A fresh worker drains in each repeat; the lengths take turns."""
    found: dict[int, list[Answer]] = {length: [] for length in LENGTHS}
    added: dict[int, list[float]] = {length: [] for length in LENGTHS}
    async with fleet() as (running, client):
        for number, (_, length) in enumerate(itertools.product(range(repeats), LENGTHS)):
            await running.spawn(f"decode-{number + 1}")  # the routers do not know it
            async with streams(client, random_prompts(STREAMS_PER_GAP, length, number), 150) as begun:
                await running.publish()
                since = time.perf_counter()
                await running.drain(f"decode-{number}")
            found[length] += begun
            for gaps in (gaps_of(stream, since) for stream in begun if stream.finished.num_moves):
                step_s = statistics.median(gaps)  # about a step
                added[length].append(1e3 * max(0.0, max(gaps) - 2 * step_s))
            await running.services.pop(f"decode-{number}").close()
            await running.publish()
    for length, begun in found.items():
        name = f"gap: {length} tokens, added by a move"
        report.add(Line(f"{name}, p50", statistics.median(added[length]), "ms", most=MOST_ADDED_MS))
        report.add(Line(f"{name}, p99", percentile(added[length], 0.99), "ms", most=MOST_ADDED_P99_MS))
        report.add(Line(f"gap: {length} tokens, streams that moved", len(added[length]), f"of {len(begun)}"))
        report.add(Line(f"gap: {length} tokens, computed again", recomputed(begun), "tokens", most=0.0))


async def drain(report: Report, repeats: int) -> None:
    ways: dict[str, list[float]] = {"moves": [], "waiting": [], "death": []}
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    again: dict[str, float] = dict.fromkeys(ways, 0.0)
    failed: dict[str, float] = dict.fromkeys(ways, 0.0)
    rates = []
    for repeat in range(repeats):
        for way in ways:
            async with fleet() as (running, client):
                await running.spawn("decode-1")
                async with streams(client, random_prompts(DRAINED_STREAMS, DRAINED_TOKENS, repeat), 400) as begun:
                    if way != "waiting":
                        await running.publish()
                    start = time.perf_counter()
                    await (running.kill("decode-0") if way == "death" else running.drain("decode-0"))
                    seconds = time.perf_counter() - start
                    if way == "moves":
                        moved = await asyncio.to_thread(running.services["decode-1"].call, "counters")
                        rates.append(moved["read_bytes"] / seconds)
                if way == "death":  # until the last stream goes on
                    seconds = max(max(gaps_of(stream, start)) for stream in begun)
                ways[way].append(seconds)
                gaps[way] += [max(gaps_of(stream, start)) for stream in begun]
                again[way] += recomputed(begun)
                failed[way] += failures(begun)
    what = f"drain: {DRAINED_STREAMS} streams of {DRAINED_TOKENS} tokens"
    for way, times in ways.items():
        goal = MOST_DRAIN_S if way == "moves" else None
        report.add(Line(f"{what}, by {way}", statistics.median(times), "s", most=goal))
        report.add(Line(f"{what}, by {way}: longest gap of a stream, p99", percentile(gaps[way], 0.99), "s"))
        report.add(
            Line(f"{what}, by {way}: computed again", again[way] / repeats, "tokens", most=0.0 if goal else None)
        )
        report.add(Line(f"{what}, by {way}: failed requests", failed[way], "", most=0.0))
    report.add(Line(f"{what}, by moves: KV moved", statistics.median(rates) / 1e9, "GB/s"))


async def router(report: Report, repeats: int) -> None:
    gaps: list[float] = []
    failed = again = 0.0
    for repeat in range(repeats):
        async with fleet(num_decode=2, num_routers=2) as (running, client):
            async with streams(client, random_prompts(64, 256, repeat), 200) as begun:
                since = time.perf_counter()
                await running.kill("router-0")
            gaps += [max(gaps_of(stream, since)) for stream in begun]
            failed += failures(begun)
            again += recomputed(begun)
    what = "router: one of two is killed, longest gap of a stream, p99"
    report.add(Line(what, percentile(gaps, 0.99), "s", most=MOST_ROUTER_GAP_S))
    report.add(Line("router: failed requests", failed, "", most=0.0))
    report.add(Line("router: computed again, a stream", again / len(gaps), "tokens", most=float(BLOCK_SIZE)))


Part = Callable[[Report, int], Coroutine[Any, Any, None]]
PARTS: dict[str, Part] = {"gap": gap, "drain": drain, "router": router}
