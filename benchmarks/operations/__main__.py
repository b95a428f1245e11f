"""What clients feel of changes to a fleet: `make bench-operations`.

    roll                `tandem apply --restart` of two workers of each role and two routers, under load
    change              a live option is changed, until every service has it, under load (both: 2 minutes)
    gap, drain, router  requests move, workers and routers die (benchmarks/operations/moves.py; 10 minutes)
    disk                a killed worker finds its KV on disk (benchmarks/operations/prefixes.py; 2 minutes)
    prefix, source      a worker reads a history from a peer (there; 4 minutes)

Within a part the load, the fleet and the cores are the same, and only the named event differs. `roll` and `change` have
real processes and the real control path; the model is a fake one, so that two cores have room for the load. No stream
of theirs may fail, and no token be computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.asking import ask, random_prompts, until
from benchmarks.operations import moves, prefixes
from benchmarks.report import Line, Report, parser_of, run_parts
from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2
from tests.support.child_processes import tandem

PORT = 50655
ADDRESS = f"127.0.0.1:{PORT}"
NUM_CLIENTS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 100
SERVING = cluster_pb2.SLOT_STATE_SERVING


@dataclass(slots=True)
class Counts:
    ended: int = 0
    failed: int = 0
    recomputed: int = 0  # tokens


async def one(connection: AsyncClient, counts: Counts, number: int) -> None:
    prompt = [token_id % 200 + 1 for token_id in random_prompts(1, PROMPT_TOKENS, number)[0]]
    answer = await ask(connection, prompt, OUTPUT_TOKENS)
    counts.failed += bool(answer.error)
    if answer.error:
        print(answer.error, file=sys.stderr)
    else:
        counts.ended += 1
    counts.recomputed += answer.finished.recomputed_tokens


@contextlib.asynccontextmanager
async def loaded(counts: Counts) -> AsyncIterator[AsyncClient]:
    """Clients that ask one request after the other."""
    is_over = False

    async def ask_on(connection: AsyncClient, number: int) -> None:
        while not is_over:
            number += NUM_CLIENTS
            await one(connection, counts, number)

    async with client_of(ADDRESS, find_credentials(None, ADDRESS)) as connection:
        asking = [asyncio.create_task(ask_on(connection, number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(1.0)
        yield connection
        is_over = True
        await asyncio.gather(*asking)
    assert counts.ended, "no request has ended: there was no load"


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


async def change(report: Report, repeats: int) -> None:
    counts, seconds = Counts(), list[float]()
    async with loaded(counts) as connection:
        await until(connection, lambda fleet: all(slot.state == SERVING for slot in fleet.slots))
        for repeat in range(3 * repeats):
            start = time.perf_counter()
            options = f'{{"router": {{"max_queued": {1000 + repeat}}}}}'
            revision = (await connection.apply(options=options)).config_revision
            await until(connection, lambda fleet: {slot.config_revision for slot in fleet.slots} == {revision})  # noqa: B023
            seconds.append(time.perf_counter() - start)
    report.add(Line("a live change until every service has it, longest", max(seconds), "s", most=1.0))
    add_counts(report, "live changes under load", counts)


def under_tandem(part: moves.Part, report: Report, repeats: int) -> None:
    with tandem(PORT, "--model", "fake:tiny", "--prefill", "2", "--decode", "2", "--routers", "2"):
        asyncio.run(part(report, repeats))


CHANGES: dict[str, moves.Part] = {"roll": roll, "change": change}
OTHERS = moves.PARTS | {"disk": prefixes.disk, "prefix": prefixes.prefix, "source": prefixes.source}


def main() -> None:
    arguments = parser_of(__doc__, (*CHANGES, *OTHERS), repeats=3).parse_args()
    report, repeats = Report("operations"), arguments.repeats
    parts: dict[str, Callable[[], None]] = {
        name: partial(under_tandem, part, report, repeats) for name, part in CHANGES.items()
    }
    parts |= {name: partial(lambda part: asyncio.run(part(report, repeats)), part) for name, part in OTHERS.items()}
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
