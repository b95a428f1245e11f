"""What clients feel when running requests move between decode workers, and when a worker or a router dies.

Real processes on this machine (benchmarks/service.py): routers, prefill and decode workers, nixl. A step takes a fixed
time, so the gaps are those of the moves and not of a CPU that computes two models.

    gap      a worker drains under streams of 256, 2,048 and 8,000 tokens. The added gap of a stream is its longest time
             without a token less two median ones: the old worker's last step, and the new one's first
    drain    a worker with 32 streams of 2,048 tokens drains: by moves, by waiting for their ends. Or it is killed
    router   one of two routers is killed under 64 streams
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from benchmarks.asking import Answer, random_prompts, streams
from benchmarks.report import Line, Report, percentile
from benchmarks.service import BLOCK_SIZE, MOVING, Role, ServiceProcess
from tandem_client import AsyncClient

TIMEOUT_S = 120.0
LENGTHS = (256, 2048, 8000)
STREAMS_PER_GAP = 4
DRAINED_STREAMS, DRAINED_TOKENS = 32, 2048
MOST_ADDED_MS, MOST_ADDED_P99_MS = 15.0, 60.0
MOST_DRAIN_S = 3.0
MOST_ROUTER_GAP_S = 2.0
STEP_S, PREFILL_STEP_S, NUM_BLOCKS = 0.02, 0.002, 6144


class Fleet:
    """Routers, one prefill worker, and decode workers, which come and go."""

    def __init__(self, stack: contextlib.ExitStack, num_routers: int, *decode: Role) -> None:
        self._stack = stack
        self.routers = [self._start(Role("router", ordinal=ordinal)) for ordinal in range(num_routers)]
        self.prefill = self._start(Role("prefill", config=MOVING, step_s=PREFILL_STEP_S, num_blocks=NUM_BLOCKS))
        self.decode = [self._start(role) for role in decode]
        for process in (*self.routers, self.prefill, *self.decode):
            process.wait_until_ready()
        self.publish()

    def _start(self, role: Role) -> ServiceProcess:
        process = ServiceProcess(role)
        self._stack.callback(process.stop)
        return process

    def spare(self, role: Role) -> ServiceProcess:
        """Runs, but the routers do not know it."""
        process = self._start(role)
        process.wait_until_ready()
        return process

    async def join(self, process: ServiceProcess) -> None:
        self.decode.append(process)
        await asyncio.to_thread(self.publish)

    def publish(self) -> None:
        for router in self.routers:
            router.follow([self.prefill, *self.decode])

    def leave(self, worker: ServiceProcess) -> None:
        """Its process has served its last request."""
        self.decode.remove(worker)
        self.publish()

    async def drain(self, worker: ServiceProcess) -> float:
        """As the supervisor drains a worker. Returns seconds."""
        start = time.perf_counter()
        worker.draining = True
        await asyncio.to_thread(self.publish)
        await asyncio.to_thread(worker.call, "drain", timeout_s=TIMEOUT_S)
        return time.perf_counter() - start

    @property
    def addresses(self) -> list[str]:
        return [router.address for router in self.routers]


def decode_role(ordinal: int) -> Role:
    return Role("decode", ordinal=ordinal, config=MOVING, step_s=STEP_S, num_blocks=NUM_BLOCKS)


@contextlib.contextmanager
def fleet(*decode: Role, num_routers: int = 1) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, num_routers, *decode)


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
    with fleet(decode_role(0)) as running:
        async with AsyncClient(running.addresses) as client:
            for repeat in range(repeats):
                for length in LENGTHS:
                    (leaving,), number = running.decode, repeat * len(LENGTHS) + LENGTHS.index(length)
                    spare = running.spare(decode_role(1 + number))
                    async with streams(client, random_prompts(STREAMS_PER_GAP, length, number), 150) as begun:
                        await running.join(spare)
                        since = time.perf_counter()
                        await running.drain(leaving)
                    found[length] += begun
                    for gaps in (gaps_of(stream, since) for stream in begun if stream.finished.num_moves):
                        step_s = statistics.median(gaps)  # about a step
                        added[length].append(1e3 * max(0.0, max(gaps) - 2 * step_s))
                    running.leave(leaving)
                    leaving.stop()
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
            with fleet(decode_role(0)) as running:
                async with AsyncClient(running.addresses) as client:
                    (leaving,), spare = running.decode, running.spare(decode_role(1))
                    async with streams(client, random_prompts(DRAINED_STREAMS, DRAINED_TOKENS, repeat), 400) as begun:
                        if way != "waiting":
                            await running.join(spare)
                        start = time.perf_counter()
                        if way == "death":
                            leaving.kill()
                        else:
                            await running.drain(leaving)
                        seconds = time.perf_counter() - start
                        if way == "moves":
                            moved = (await asyncio.to_thread(spare.call, "counters"))["read_bytes"]
                            rates.append(moved / seconds)
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
        with fleet(decode_role(0), decode_role(1), num_routers=2) as running:
            first, second = running.addresses
            async with AsyncClient([first, second]) as client:
                async with streams(client, random_prompts(64, 256, repeat), 200) as begun:
                    since = time.perf_counter()
                    running.routers[0].kill()
                gaps += [max(gaps_of(stream, since)) for stream in begun]
                failed += failures(begun)
                again += recomputed(begun)
    what = "router: one of two is killed, longest gap of a stream, p99"
    report.add(Line(what, percentile(gaps, 0.99), "s", most=MOST_ROUTER_GAP_S))
    report.add(Line("router: failed requests", failed, "", most=0.0))
    report.add(Line("router: computed again, a stream", again / len(gaps), "tokens", most=float(BLOCK_SIZE)))


Part = Callable[[Report, int], Coroutine[Any, Any, None]]
PARTS: dict[str, Part] = {"gap": gap, "drain": drain, "router": router}
