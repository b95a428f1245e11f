"""Operators change a fleet that serves requests: `make bench-operations`.

    roll      `tandem roll` of two workers of each role and two routers, under load
    switch    a worker takes the other role: idle, and a decode worker with 16 streams
    change    a live option is changed, until every service has it, under load
    zero      the first request of an empty fleet, beside a start and a request of a fleet that serves

Real processes and the real control path; the model is a fake one, so that two cores have room for the load. In every
part no stream may fail, and no token be computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.asking import random_prompts
from benchmarks.processes import serving
from benchmarks.report import Line, Report
from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2, inference_pb2

ADDRESS = "127.0.0.1:50655"
TIMEOUT_S, LOOK_S = 300.0, 0.005
NUM_CLIENTS, NUM_STREAMS = 8, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 100
STREAM_TOKENS = 2000  # longer than a switch; one decode worker has room for all streams
PARTS = ("roll", "switch", "change", "zero")
SERVING = cluster_pb2.SLOT_STATE_SERVING
ROLES = {"prefill": cluster_pb2.SERVICE_ROLE_PREFILL, "decode": cluster_pb2.SERVICE_ROLE_DECODE}
ZERO = "[planner]\nenabled = true\nmin_prefill = 0\nmin_decode = 0\nidle_s = 5.0\n"


@dataclass(slots=True)
class Counts:
    ended: int = 0
    failed: int = 0
    recomputed: int = 0  # tokens


def client() -> AsyncClient:
    return client_of(ADDRESS, find_credentials(None, ADDRESS))


async def one(connection: AsyncClient, counts: Counts, number: int, num_tokens: int) -> None:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(token_id % 200 + 1 for token_id in random_prompts(1, PROMPT_TOKENS, number)[0])
    request.stop.max_tokens, request.stop.ignore_eos = num_tokens, True
    try:
        async for response in connection.generate(request, TIMEOUT_S):
            if response.HasField("finished"):
                counts.ended += 1
                counts.recomputed += response.finished.recomputed_tokens
    except CallFailed as error:
        counts.failed += 1
        print(error, file=sys.stderr)


@contextlib.asynccontextmanager
async def loaded(counts: Counts) -> AsyncIterator[AsyncClient]:
    """Clients that ask one request after the other."""
    is_over = False

    async def ask_on(connection: AsyncClient, number: int) -> None:
        while not is_over:
            number += NUM_CLIENTS
            await one(connection, counts, number, OUTPUT_TOKENS)

    async with client() as connection:
        asking = [asyncio.create_task(ask_on(connection, number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(1.0)
        yield connection
        is_over = True
        await asyncio.gather(*asking)
    assert counts.ended, "no request has ended: there was no load"


async def until(connection: AsyncClient, holds: Callable[[cluster_pb2.GetFleetResponse], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(CallFailed):  # of a router that a roll replaces
                if holds(await connection.fleet()):
                    return
            await asyncio.sleep(LOOK_S)


def all_serve(fleet: cluster_pb2.GetFleetResponse) -> bool:
    return all(slot.state == SERVING for slot in fleet.slots)


async def seconds_of(action: Awaitable[object]) -> float:
    start = time.perf_counter()
    await action
    return time.perf_counter() - start


def add_counts(report: Report, words: str, counts: Counts) -> None:
    report.say(f"{words}: {counts.ended} streams ended")
    report.add(Line(f"{words}: streams that failed", counts.failed, "streams", most=0))
    report.add(Line(f"{words}: computed again", counts.recomputed, "tokens", most=0))


async def roll(report: Report) -> None:
    counts, words = Counts(), "roll of 2 + 2 workers and 2 routers under load"
    async with loaded(counts) as connection:
        start = time.perf_counter()
        revision = (await connection.roll()).config_revision
        await until(connection, lambda fleet: fleet.config_revision == revision and not fleet.rolling)
        seconds = time.perf_counter() - start
    report.add(Line(words, seconds, "s"))
    add_counts(report, words, counts)


async def switched(connection: AsyncClient, slot: str, role: str) -> float:
    """Seconds until the supervisor says that the worker serves in the role."""

    def serves(fleet: cluster_pb2.GetFleetResponse) -> bool:
        return any(s.name == slot and s.role == ROLES[role] and s.state == SERVING for s in fleet.slots)

    start = time.perf_counter()
    await connection.switch_role(slot, ROLES[role])
    await until(connection, serves)
    return time.perf_counter() - start


async def switch(report: Report, repeats: int) -> None:
    counts, idle, busy = Counts(), list[float](), list[float]()
    async with client() as connection:
        await until(connection, all_serve)
        decode = [s.name for s in (await connection.fleet()).slots if s.role == ROLES["decode"]]
        for repeat in range(repeats):
            idle += [await switched(connection, decode[0], role) for role in ("prefill", "decode")]
            numbers = range(repeat * NUM_STREAMS, (repeat + 1) * NUM_STREAMS)
            streams = [asyncio.create_task(one(connection, counts, number, STREAM_TOKENS)) for number in numbers]
            await asyncio.sleep(1.0)
            busy.append(await switched(connection, decode[0], "prefill"))
            await asyncio.gather(*streams)
            await switched(connection, decode[0], "decode")
    report.add(Line("switch of an idle worker, median", statistics.median(idle), "s", most=1.0))
    report.add(Line(f"switch of a decode worker, {NUM_STREAMS} streams on two, median", statistics.median(busy), "s",
                    most=3.0))  # fmt: skip
    add_counts(report, f"switch with {NUM_STREAMS} streams", counts)


async def change(report: Report, repeats: int) -> None:
    counts, seconds = Counts(), list[float]()
    async with loaded(counts) as connection:
        await until(connection, all_serve)
        for repeat in range(3 * repeats):
            start = time.perf_counter()
            options = f'{{"router": {{"max_queued": {1000 + repeat}}}}}'
            revision = (await connection.change_config(options=options)).config_revision
            await until(connection, lambda fleet: {slot.config_revision for slot in fleet.slots} == {revision})  # noqa: B023
            seconds.append(time.perf_counter() - start)
    report.add(Line("a live change until every service has it, longest", max(seconds), "s", most=1.0))
    add_counts(report, "live changes under load", counts)


async def zero(report: Report, repeats: int) -> None:
    counts, firsts, starts, warm = Counts(), list[float](), list[float](), list[float]()
    async with client() as connection:
        for repeat in range(repeats):
            await until(connection, lambda fleet: not fleet.wanted_decode and not fleet.workers)
            last = max((event.number for event in (await connection.events(1000)).events), default=0)
            firsts.append(await seconds_of(one(connection, counts, 2 * repeat, 1)))
            warm.append(await seconds_of(one(connection, counts, 2 * repeat + 1, 1)))
            events = (await connection.events(1000, last)).events
            times = [event.at_unix_ms for event in events if event.subject.startswith("decode")]
            starts.append((times[-1] - min(event.at_unix_ms for event in events)) / 1e3)
    first, start, request = (statistics.median(values) for values in (firsts, starts, warm))
    report.add(Line("first request of an empty fleet", first, "s"))
    report.add(Line("... of which neither the start of a worker nor a request", first - start - request, "s", most=1.0))
    add_counts(report, "requests of an empty fleet", counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("operations")
    tandem = Path(sys.executable).with_name("tandem")
    command: list[str | Path] = [tandem, "serve", "--model", "fake:tiny", "--port", ADDRESS.rpartition(":")[2]]
    with serving([*command, "--prefill", "2", "--decode", "2", "--routers", "2"]):
        if "change" in arguments.parts:
            asyncio.run(change(report, arguments.repeats))
        if "switch" in arguments.parts:
            asyncio.run(switch(report, arguments.repeats))
        if "roll" in arguments.parts:
            asyncio.run(roll(report))
    if "zero" in arguments.parts:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
            config.write(ZERO)
            config.flush()
            with serving([*command, "--config", config.name]):
                asyncio.run(zero(report, arguments.repeats))
    report.write()


if __name__ == "__main__":
    main()
