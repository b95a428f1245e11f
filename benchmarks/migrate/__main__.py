"""What clients feel when running requests move between decode workers: `make bench-migrate`.

Real processes on this machine: routers, prefill and decode workers, nixl. Only the model is not there: a step takes a
fixed time (benchmarks/migrate/side.py), so the gaps are those of the moves and not of a CPU that computes two models.

    gap      a worker drains under streams of 256, 2,048 and 8,000 tokens. The added gap of a stream is its longest time
             without a token less two median ones: the old worker's last step, and the new one's first
    stay     8 streams of a worker that takes 32 streams of 2,048 tokens of another
    drain    a worker with 32 streams of 2,048 tokens drains: by moves, by waiting for their ends. Or it is killed
    room     more KV than fits: with moves, and with preemptions alone
    router   one of two routers is killed under 64 streams
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.asking import FIRST_WORD_ID, LAST_WORD_ID
from benchmarks.migrate.side import BLOCK_SIZE, Side
from benchmarks.processes import ChildProcess
from benchmarks.report import Line, Report
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2

TIMEOUT_S = 120.0
LENGTHS = (256, 2048, 8000)
STREAMS_PER_GAP, BEGUN_TOKENS = 4, 8
DRAINED_STREAMS, DRAINED_TOKENS = 32, 2048
STAYING_STREAMS, CALM_S = 8, 1.5
PARTS = ("gap", "stay", "drain", "room", "router")
MOST_ADDED_MS, MOST_ADDED_P99_MS, MOST_GROWTH = 15.0, 60.0, 1.5
MOST_DRAIN_S = 3.0
MOST_STAYING_GROWTH = 1.5
MOST_ROUTER_GAP_S = 2.0


class Process(ChildProcess):
    def __init__(self, side: Side) -> None:
        command = [sys.executable, "-m", "benchmarks.migrate.side", json.dumps(asdict(side))]
        super().__init__(f"{side.role}-{side.ordinal}", command)
        self.draining = False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def listed(self) -> dict[str, Any]:
        endpoint: dict[str, Any] = self.call("endpoint")
        return endpoint | {"draining": self.draining}


class Fleet:
    """Routers, one prefill worker, and decode workers, which come and go."""

    def __init__(self, stack: contextlib.ExitStack, num_routers: int, *decode: Side) -> None:
        self._stack = stack
        self.routers = [self._start(Side("router", ordinal)) for ordinal in range(num_routers)]
        self.prefill = self._start(Side("prefill", step_s=0.002))
        self.decode = [self._start(side) for side in decode]
        for process in (*self.routers, self.prefill, *self.decode):
            process.wait_until_ready()
        self.publish()

    def _start(self, side: Side) -> Process:
        process = Process(side)
        self._stack.callback(process.stop)
        return process

    def spare(self, side: Side) -> Process:
        """Runs, but the routers do not know it."""
        process = self._start(side)
        process.wait_until_ready()
        return process

    async def join(self, process: Process) -> None:
        self.decode.append(process)
        await asyncio.to_thread(self.publish)

    def publish(self) -> None:
        workers = [process.listed() for process in (self.prefill, *self.decode)]
        for router in self.routers:
            router.call("follow", workers=workers)

    def leave(self, worker: Process) -> None:
        """Its process has served its last request."""
        self.decode.remove(worker)
        self.publish()

    @property
    def addresses(self) -> list[str]:
        return [router.call("endpoint")["address"] for router in self.routers]


@contextlib.contextmanager
def fleet(*decode: Side, num_routers: int = 1) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, num_routers, *decode)


@dataclass(slots=True, eq=False)
class Stream:
    prompt: list[int]
    num_output: int
    times: list[float] = field(default_factory=list)  # one for each token
    finished: inference_pb2.Finished | None = None
    error: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(self.prompt)
        request.sampling.temperature = 0.0
        request.stop.max_tokens, request.stop.ignore_eos = self.num_output, True
        try:
            async for response in client.generate(request, TIMEOUT_S):
                self.times += [time.perf_counter()] * len(response.tokens.token_ids)
                if len(self.times) > BEGUN_TOKENS:
                    self.has_begun.set()
                if response.HasField("finished"):
                    self.finished = response.finished
        except CallFailed as error:
            self.error = str(error)
        self.has_begun.set()

    def gaps(self, since: float, until: float = math.inf) -> list[float]:
        """Those that ended after `since`, when the part began to disturb the streams, and at the latest at `until`."""
        return [after - before for before, after in pairwise(self.times) if since < after <= until]

    def longest_gap(self, since: float) -> tuple[float, float]:
        """The longest gap and the median one, which is about a step."""
        gaps = self.gaps(since)
        return max(gaps), statistics.median(gaps)

    @property
    def has_moved(self) -> bool:
        return self.finished is not None and self.finished.num_moves > 0


@contextlib.asynccontextmanager
async def streams(
    client: AsyncClient, count: int, num_tokens: int, num_output: int, seed: int
) -> AsyncIterator[list[Stream]]:
    """Streams that have begun. The end of the block waits for their ends."""
    draw = random.Random(seed)
    prompts = [[draw.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)] for _ in range(count)]
    begun = [Stream(prompt, num_output) for prompt in prompts]
    async with asyncio.TaskGroup() as tasks:
        for stream in begun:
            tasks.create_task(stream.run(client))
        await asyncio.gather(*(stream.has_begun.wait() for stream in begun))
        yield begun


async def in_thread(process: Process, do: str, **arguments: Any) -> Any:
    return await asyncio.to_thread(process.call, do, **arguments)


async def drain(running: Fleet, worker: Process) -> float:
    """As the supervisor drains a worker. Returns seconds."""
    start = time.perf_counter()
    worker.draining = True
    await asyncio.to_thread(running.publish)
    await in_thread(worker, "drain", timeout_s=TIMEOUT_S)
    return time.perf_counter() - start


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def failures(found: Sequence[Stream]) -> float:
    return float(sum(bool(stream.error) or stream.finished is None for stream in found))


def recomputed(found: Sequence[Stream]) -> float:
    return float(sum(stream.finished.recomputed_tokens for stream in found if stream.finished is not None))


# ---- parts


async def gap(report: Report, repeats: int) -> None:
    """A fresh worker drains in each repeat; the lengths take turns."""
    found: dict[int, list[Stream]] = {length: [] for length in LENGTHS}
    added: dict[int, list[float]] = {length: [] for length in LENGTHS}
    longer: dict[int, list[float]] = {length: [] for length in LENGTHS}
    with fleet(Side("decode", 0)) as running:
        async with AsyncClient(running.addresses) as client:
            for repeat in range(repeats):
                for length in LENGTHS:
                    (leaving,), number = running.decode, repeat * len(LENGTHS) + LENGTHS.index(length)
                    spare = running.spare(Side("decode", 1 + number))
                    async with streams(client, STREAMS_PER_GAP, length, 150, number) as begun:
                        await running.join(spare)
                        since = time.perf_counter()
                        await drain(running, leaving)
                    found[length] += begun
                    for longest_s, step_s in (stream.longest_gap(since) for stream in begun if stream.has_moved):
                        added[length].append(1e3 * max(0.0, longest_s - 2 * step_s))
                        longer[length].append(1e3 * (longest_s - step_s))
                    running.leave(leaving)
                    leaving.stop()
    for length, begun in found.items():
        name = f"gap: {length} tokens, added by a move"
        report.add(Line(f"{name}, p50", statistics.median(added[length]), "ms", most=MOST_ADDED_MS))
        report.add(Line(f"{name}, p99", percentile(added[length], 0.99), "ms", most=MOST_ADDED_P99_MS))
        name = f"gap: {length} tokens, across a move less one step"
        report.add(Line(f"{name}, p50", statistics.median(longer[length]), "ms"))
        report.add(Line(f"{name}, p99", percentile(longer[length], 0.99), "ms"))
        report.add(Line(f"gap: {length} tokens, streams that moved", len(added[length]), f"of {len(begun)}"))
        report.add(Line(f"gap: {length} tokens, computed again", recomputed(begun), "tokens", most=0.0))
    growth = statistics.median(longer[LENGTHS[-1]]) / statistics.median(longer[LENGTHS[0]])
    report.add(
        Line(f"gap: less one step, p50 at {LENGTHS[-1]} tokens / at {LENGTHS[0]}", growth, "x", most=MOST_GROWTH)
    )


async def stay(report: Report, repeats: int) -> None:
    """Router 1 knows only the worker that stays, and router 0 only the other one until that drains."""
    calm: list[float] = []
    crowded: list[float] = []
    for repeat in range(repeats):
        with fleet(Side("decode", 0), num_routers=2) as running:
            (leaving,), staying = running.decode, running.spare(Side("decode", 1))
            for_leaving, for_staying = running.addresses
            listed = [running.prefill.listed(), staying.listed()]
            await in_thread(running.routers[1], "follow", workers=listed)
            async with (
                AsyncClient([for_staying]) as client,
                AsyncClient([for_leaving]) as other,
                streams(client, STAYING_STREAMS, LENGTHS[0], 600, repeat) as begun,
                streams(other, DRAINED_STREAMS, DRAINED_TOKENS, 400, 1000 + repeat) as moving,
            ):
                await asyncio.sleep(CALM_S)
                since = time.perf_counter()
                await running.join(staying)
                await drain(running, leaving)
                until = time.perf_counter()
            for stream in begun:
                calm += stream.gaps(since - CALM_S, since)
                crowded += stream.gaps(since, until)
            assert not failures([*begun, *moving])
            assert any(stream.has_moved for stream in moving)
    p99 = percentile(crowded, 0.99)
    what = f"stay: {STAYING_STREAMS} streams of a worker that takes {DRAINED_STREAMS}, gaps p99"
    report.add(Line(f"{what}, before", 1e3 * percentile(calm, 0.99), "ms"))
    report.add(Line(f"{what}, meanwhile", 1e3 * p99, "ms"))
    report.add(Line(f"{what}, meanwhile / before", p99 / percentile(calm, 0.99), "x", most=MOST_STAYING_GROWTH))


async def drain_many(report: Report, repeats: int) -> None:
    ways: dict[str, list[float]] = {"moves": [], "waiting": [], "death": []}
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    again: dict[str, float] = dict.fromkeys(ways, 0.0)
    failed: dict[str, float] = dict.fromkeys(ways, 0.0)
    rates = []
    for repeat in range(repeats):
        for way in ways:
            with fleet(Side("decode", 0)) as running:
                async with AsyncClient(running.addresses) as client:
                    (leaving,), spare = running.decode, running.spare(Side("decode", 1))
                    async with streams(client, DRAINED_STREAMS, DRAINED_TOKENS, 400, repeat) as begun:
                        if way != "waiting":
                            await running.join(spare)
                        start = time.perf_counter()
                        if way == "death":
                            leaving.kill()
                        else:
                            await drain(running, leaving)
                        seconds = time.perf_counter() - start
                        if way == "moves":
                            moved = (await in_thread(spare, "counters"))["read_bytes"]
                            rates.append(moved / seconds)
                    if way == "death":  # until the last stream goes on
                        seconds = max(max(stream.gaps(start)) for stream in begun)
                    ways[way].append(seconds)
                    gaps[way] += [max(stream.gaps(start)) for stream in begun]
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


async def room(report: Report, repeats: int) -> None:
    """16 streams fill a pool to 1.3 of its size at their ends; a worker with a pool of the same size is half full."""
    count, num_prompt, num_output = 16, 256, 640
    demand = count * -(-(num_prompt + num_output) // BLOCK_SIZE)
    num_blocks = int(demand / 1.3)
    worst: dict[bool, list[float]] = {True: [], False: []}
    preemptions: dict[bool, float] = {True: 0.0, False: 0.0}
    for repeat in range(repeats):
        for with_moves in worst:
            side = Side("decode", 0, num_blocks=num_blocks, moves_for_room=with_moves)
            with fleet(side) as running:
                spare = running.spare(Side("decode", 1, num_blocks=num_blocks))
                async with AsyncClient(running.addresses) as client:
                    async with streams(client, count, num_prompt, num_output, repeat) as begun:
                        await running.join(spare)
                        since = time.perf_counter()
                    for process in running.decode:
                        preemptions[with_moves] += (await in_thread(process, "counters"))["preemptions"]
                    worst[with_moves] += [max(stream.gaps(since)) for stream in begun]
                    assert not failures(begun), [stream.error for stream in begun]
    p90 = {way: 1e3 * percentile(values, 0.9) for way, values in worst.items()}
    report.add(Line("room: longest gap of a stream, p90", p90[True], "ms", "preemption", p90[False], least_ratio=3.0))
    report.add(
        Line("room: preemptions", preemptions[True] / repeats, "", "preemption", preemptions[False] / repeats, most=0.0)
    )


async def router(report: Report, repeats: int) -> None:
    gaps: list[float] = []
    failed = again = 0.0
    for repeat in range(repeats):
        with fleet(Side("decode", 0), Side("decode", 1), num_routers=2) as running:
            first, second = running.addresses
            async with AsyncClient([first, second]) as client:
                async with streams(client, 64, 256, 200, repeat) as begun:
                    since = time.perf_counter()
                    running.routers[0].kill()
                gaps += [max(stream.gaps(since)) for stream in begun]
                failed += failures(begun)
                again += recomputed(begun)
    report.add(
        Line(
            "router: one of two is killed, longest gap of a stream, p99",
            percentile(gaps, 0.99),
            "s",
            most=MOST_ROUTER_GAP_S,
        )
    )
    report.add(Line("router: failed requests", failed, "", most=0.0))
    report.add(Line("router: computed again, a stream", again / len(gaps), "tokens", most=float(BLOCK_SIZE)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    report = Report("migrate")
    run = {"gap": gap, "stay": stay, "drain": drain_many, "room": room, "router": router}
    for part in arguments.parts:
        asyncio.run(run[part](report, arguments.repeats))
    report.write()


if __name__ == "__main__":
    main()
