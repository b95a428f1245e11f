"""Operators change a fleet that serves requests.

    roll      `tandem apply --restart` of two workers of each role and two routers, under load
    switch    a worker takes the other role: idle, and a decode worker with 16 streams
    change    a live option is changed, until every service has it, under load
    zero      the first request of an empty fleet, beside a start and a request of a fleet that serves

Real processes and the real control path; the model is a fake one, so that two cores have room for the load. In every
part no stream may fail, and no token be computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from benchmarks.asking import ask, random_prompts
from benchmarks.processes import tandem
from benchmarks.report import Line, Report
from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2

PORT = 50655
ADDRESS = f"127.0.0.1:{PORT}"
TIMEOUT_S, LOOK_S = 300.0, 0.005
NUM_CLIENTS, NUM_STREAMS = 8, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 100
STREAM_TOKENS = 2000  # longer than a switch; one decode worker has room for all streams
SERVING = cluster_pb2.SLOT_STATE_SERVING
ROLES = {"prefill": cluster_pb2.SERVICE_ROLE_PREFILL, "decode": cluster_pb2.SERVICE_ROLE_DECODE}
TWO_OF_EACH = (("--prefill", "2", "--decode", "2", "--routers", "2"), "")
ZERO = "[planner]\nenabled = true\nmin_prefill = 0\nmin_decode = 0\nidle_s = 5.0\n"


@dataclass(slots=True)
class Counts:
    ended: int = 0
    failed: int = 0
    recomputed: int = 0  # tokens


def client() -> AsyncClient:
    return client_of(ADDRESS, find_credentials(None, ADDRESS))


async def one(connection: AsyncClient, counts: Counts, number: int, num_tokens: int) -> None:
    prompt = [token_id % 200 + 1 for token_id in random_prompts(1, PROMPT_TOKENS, number)[0]]
    answer = await ask(connection, prompt, num_tokens, TIMEOUT_S, 0.0)
    counts.failed += bool(answer.error)
    if answer.error:
        print(answer.error, file=sys.stderr)
    if answer.finished is not None:
        counts.ended += 1
        counts.recomputed += answer.finished.recomputed_tokens


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


async def roll(report: Report, _: int) -> None:
    counts, words = Counts(), "roll of 2 + 2 workers and 2 routers under load"
    async with loaded(counts) as connection:
        start = time.perf_counter()
        revision = (await connection.apply(restart=True)).config_revision
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
            revision = (await connection.apply(options=options)).config_revision
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


PARTS = {"roll": roll, "switch": switch, "change": change, "zero": zero}
FLEETS = {  # flags and config of each part's fleet
    "roll": TWO_OF_EACH, "switch": TWO_OF_EACH, "change": TWO_OF_EACH, "zero": ((), ZERO),
}  # fmt: skip


def run(part: str, report: Report, repeats: int) -> None:
    flags, config = FLEETS[part]
    with tandem(PORT, "--model", "fake:tiny", *flags, config=config):
        asyncio.run(PARTS[part](report, repeats))
