"""`make soak`: 20,000 requests through a transport that fails one operation in ten, then 10,000 more while workers are
replaced one after the other. With `--processes` only those 10,000, through a fleet of `tandem serve`.

Two prefill and two decode workers with the fake runner: one wrong byte of KV makes its tokens wrong. They are in one
process, with real gRPC, agents and machines over the memory transport; or in processes of their own over nixl, which
one `tandem apply --restart` after the other replaces, and the router too. A seed draws the faults of the transport: see
tests/support/unreliable_transport.py. Workers read cached prefixes wherever a peer has one, or the disk below their
pools, which are small: tests/support/eager_reads.py.

The soak fails if a token is wrong, a request does not end, or a block is leaked. In one process it also fails if the
second half of the requests makes a container, the memory of the process or the number of its descriptors grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import Line, Report
from cli import compose
from cli.commands.fleet_config import toml_lines
from cli.credentials import client_of, find_credentials
from core.config import CacheConfig, ConfigText, TandemConfig
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2
from tests.support.command import serving, tandem
from tests.support.deployment import SLACK_S, Deployment, deploy, machine_of, place, transfers
from tests.support.eager_reads import eager_reads
from tests.support.faults import LEASE_S, Prompt, Stream, expected, fault_config, prompt_of
from tests.support.live_objects import Footprint, growth
from tests.support.served_answers import Answer
from tests.support.steps import slow_down
from tests.support.unreliable_transport import Faults
from worker.service import WorkerService

NUM_PROMPTS = 400  # some requests share a prefix with others
TIMEOUT_S = 30.0
STEP_S = 0.005  # while workers are replaced: else few sequences run when a drain begins
LONGEST = 200  # tokens of an answer of the fleet, for the same reason
POOL_MB, DISK_GB = 1, 0.01  # so small that blocks are evicted, and read again
MAX_NEW_DESCRIPTORS = 8
MAX_GROWTH_MB = 64.0  # the caches of prompts and of expected tokens still fill in the second half


@dataclass
class Tally:
    right: int = 0
    wrong: int = 0
    endless: int = 0
    typed: Counter[str] = field(default_factory=Counter)  # by gRPC code and message
    paths: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    num_with_prefix: int = 0  # whose prefix came from a peer or from disk

    @property
    def num_ended(self) -> int:
        return self.right + self.wrong + self.typed.total()

    def count_stream(self, stream: Stream) -> None:
        """Of a stream that has ended."""
        answer, end = stream.answer, stream.answer.end
        wanted = expected(stream.prompt, stream.num_output)
        if answer.indices != list(range(stream.num_tokens)) or answer.token_ids != wanted[: stream.num_tokens]:
            self.wrong += 1
        elif stream.code:
            self.typed[f"{stream.code.name}: {stream.details}"] += 1
        elif end is None or stream.num_tokens != stream.num_output:
            self.wrong += 1
        else:
            self.right += 1
            self.paths[inference_pb2.RequestPath.Name(end.path)] += 1
            self.attempts[end.attempts] += 1
            self.num_with_prefix += end.receipt.read_tokens > 0


def soak_config(transport: str, disk_dir: str) -> TandemConfig:
    config = fault_config(transport, peer_prefixes="auto")
    engine = replace(config.engine, kv_memory_mb=POOL_MB)
    return replace(config, engine=engine, cache=CacheConfig(disk_gb=DISK_GB, disk_dir=disk_dir))


def draw(generator: random.Random, longest: int) -> tuple[Prompt, int]:
    """A prompt, and how many tokens to generate."""
    return prompt_of(generator.randrange(NUM_PROMPTS), generator.randrange(1, 100)), generator.randrange(1, longest)


async def one_client(
    deployment: Deployment, tally: Tally, generator: random.Random, num_requests: int, longest: int
) -> None:
    for _ in range(num_requests):
        prompt, num_output = draw(generator, longest)
        stream = Stream(deployment.inference, prompt, num_output, TIMEOUT_S)
        try:
            await stream.end()
        except TimeoutError:
            tally.endless += 1
        else:
            tally.count_stream(stream)


async def roll(deployment: Deployment, faults: Counter[str], answering: asyncio.Task[None]) -> None:
    """Replace one worker after the other as long as this task runs: a new one serves, then the old one drains and goes.

    Each replacement ends: a worker whose start is cancelled leaves the thread of its agent behind.
    """
    for number in itertools.takewhile(lambda _: not answering.done(), itertools.count(2)):
        is_decode = number % 2 == 0
        pool = deployment.decode if is_decode else deployment.prefill
        build = compose.build_decode_worker if is_decode else compose.build_prefill_worker
        old, new = pool[0], build(deployment.config, place(number))
        try:
            deployment.endpoints[id(new)] = await new.start()
            slow_down(new, STEP_S)
            pool.append(new)
            await publish(deployment)
            await publish(deployment, leaving=old)
            await old.drain(TIMEOUT_S)
            pool.remove(old)
            del deployment.endpoints[id(old)]
            await publish(deployment)
        finally:
            await (new if new not in pool else old).stop()
        faults["drain"] += 1


async def publish(deployment: Deployment, leaving: WorkerService | None = None) -> None:
    """As the supervisor does. A new worker has no time to settle in."""
    endpoints = [replace(deployment.endpoints[id(each)], draining=each is leaving) for each in deployment.workers]
    await deployment.router.set_workers(endpoints)


async def soak(
    num_requests: int, fault_rate: float, seed: int, num_clients: int = 16, num_rolling: int = 0
) -> tuple[Tally, Counter[str]]:
    """The tally and the injected faults. Raises `AssertionError` if a block or anything else is leaked.

    `num_rolling` further requests come while workers are replaced; those may be long enough to move.
    """
    tally, counts = Tally(), Counter[str]()

    async def answer(part: int, num_requests: int, longest: int = 12) -> None:
        shares = [num_requests // num_clients + (n < num_requests % num_clients) for n in range(num_clients)]
        faults.rate = fault_rate  # only from here on, so that the workers can connect
        await asyncio.gather(*(
            one_client(deployment, tally, random.Random(seed * 997 + part * num_clients + n), share, longest)
            for n, share in enumerate(shares)
        ))  # fmt: skip
        faults.rate = 0.0
        await deployment.settle()

    with contextlib.ExitStack() as stack:
        for change in eager_reads():
            stack.enter_context(change)
        faults, disk_dir = stack.enter_context(unreliable(seed)), stack.enter_context(tempfile.TemporaryDirectory())
        async with deploy(soak_config("memory", disk_dir), num_prefill=2, num_decode=2) as deployment:
            footprints = []
            for half in range(2):
                await answer(half, num_requests // 2)
                footprints.append(Footprint.now())
            at_half_time, at_the_end = footprints
            check_flat(at_half_time, at_the_end, num_requests // 2)
            ended = sum((transfers(worker).counters.pulls for worker in deployment.decode), Counter[str]())
            counts.update({f"(pulls {state})": count for state, count in ended.items()})
            tiers = [machine_of(worker).core.tier for worker in deployment.workers]
            counts["(blocks read from disk)"] = sum(tier.counts.num_read for tier in tiers if tier is not None)
            if num_rolling:
                for worker in deployment.workers:
                    slow_down(worker, STEP_S)
                answering = asyncio.create_task(answer(2, num_rolling, longest=40))
                await asyncio.gather(answering, roll(deployment, counts, answering))
            counts += faults.done()
    return tally, counts


@contextlib.contextmanager
def unreliable(seed: int) -> Iterator[Faults]:
    """Every transport that opens in this process has these faults; none at first."""
    with tempfile.NamedTemporaryFile() as log:
        faults = Faults(Path(log.name), seed, rate=0.0)
        with patch.object(compose, "open_transport", faults.opening(compose.open_transport)):
            yield faults


async def soak_processes(
    num_requests: int, fault_rate: float, seed: int, num_clients: int = 16, num_of_each: int = 2
) -> tuple[Tally, Counter[str]]:
    """As `soak`, for at least `num_requests` through `tandem serve` and nixl: the clients send on until the last roll
    has ended. The fleet has `num_of_each` prefill and decode workers."""
    tally, counts = Tally(), Counter[str]()
    is_over = False

    async def ask_on(client: AsyncClient, generator: random.Random) -> None:
        while not is_over:
            prompt, num_output = draw(generator, longest=LONGEST)
            answer = Answer(client, prompt, num_output)
            await answer.reading
            tally.count_stream(answer)

    with (
        tempfile.NamedTemporaryFile("w", suffix=".toml") as config,
        tempfile.NamedTemporaryFile() as log,
        tempfile.TemporaryDirectory() as disk_dir,
    ):
        config.write("\n".join(toml_lines(ConfigText.of(soak_config("nixl", disk_dir)).tables)))
        config.flush()
        faults = Faults(Path(log.name), seed, fault_rate)
        program = ("tests.support.unreliable_tandem", log.name, str(seed), str(fault_rate))
        arguments = ("--config", config.name, "--prefill", str(num_of_each), "--decode", str(num_of_each))
        async with serving(*arguments, program=program) as fleet, contextlib.AsyncExitStack() as stack:
            opened = [client_of(fleet.address, find_credentials(None, fleet.address)) for _ in range(num_clients)]
            clients = [await stack.enter_async_context(client) for client in opened]
            asking = [
                asyncio.create_task(ask_on(client, random.Random(seed * 997 + number)))
                for number, client in enumerate(clients)
            ]
            while tally.num_ended < num_requests:
                code, out, err = await tandem("apply", "--restart", "--router", fleet.address)
                assert code == 0, (out, err)
                assert "killed" not in out, out
                counts["roll"] += 1
                counts["drain"] += sum("has drained" in line and "router" not in line for line in out.splitlines())
            is_over = True
            await asyncio.gather(*asking)
            await settle(clients[0], num_workers=2 * num_of_each)
            fleet.process.send_signal(signal.SIGINT)
            assert await fleet.ended() == (0, []), "processes are left"
        counts += faults.done()
    return tally, counts


async def settle(client: AsyncClient, num_workers: int) -> None:
    """Wait at most a lease until no request is open and every worker says that none of its blocks is in use."""
    give_up_at = time.monotonic() + LEASE_S + SLACK_S
    while True:
        fleet, workers = await client.fleet(), (await client.ledger()).workers
        left = [str(worker) for worker in workers if worker.error or worker.ledger.holders]
        if len(workers) == num_workers and not (fleet.num_in_flight or fleet.num_queued or left):
            return
        assert time.monotonic() < give_up_at, f"{len(workers)} workers, {fleet.num_in_flight} requests, {left}"
        await asyncio.sleep(0.1)


def check_flat(before: Footprint, after: Footprint, num_requests: int) -> None:
    """Raises `AssertionError` if so much grew that one request in a hundred must have left something behind."""
    most = max(20, num_requests // 100)
    # The disks, which check their own bound, may still fill.
    bounded = "worker.tier.slot_table."
    grown = growth(before.live, after.live)
    grown = {name: count for name, count in grown.items() if count > most and not name.startswith(bounded)}
    assert not grown, f"{num_requests} requests left {grown}"
    descriptors = after.num_descriptors - before.num_descriptors
    assert descriptors <= MAX_NEW_DESCRIPTORS, f"{num_requests} requests left {descriptors} descriptors"
    megabytes = after.resident_mb - before.resident_mb
    assert megabytes <= MAX_GROWTH_MB, f"{num_requests} requests left {megabytes:.0f} MB of memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--fault-rate", type=float, default=0.1, help="share of the transport's operations that fail")
    parser.add_argument("--rolling", type=int, default=10_000, help="requests while workers are replaced")
    parser.add_argument("--processes", action="store_true", help="only the latter, in processes of their own over nixl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16, help="requests at one time")
    arguments = parser.parse_args()
    rate, seed, num_clients = arguments.fault_rate, arguments.seed, arguments.clients
    start = time.monotonic()
    try:
        tally, faults = asyncio.run(
            soak_processes(arguments.rolling, rate, seed, num_clients)
            if arguments.processes
            else soak(arguments.requests, rate, seed, num_clients, arguments.rolling)
        )
    except AssertionError as error:
        sys.exit(f"the soak failed: {error}")
    report = Report("soak-processes" if arguments.processes else "soak")
    report.say(f"{tally.num_ended} requests, seed {seed}, fault rate {rate:g}")
    report.add(Line("all requests took", time.monotonic() - start, "s"))
    report.add(Line("right to the last token", tally.right, "requests"))
    report.add(Line("with a prefix that was read", tally.num_with_prefix, "requests", least=1))
    report.add(Line("ended by a typed error", tally.typed.total(), "requests"))
    report.add(Line("with a wrong token", tally.wrong, "requests", most=0))
    report.add(Line("without an end", tally.endless, "requests", most=0))
    report.add(Line("leaked", 0, "blocks", most=0))  # `soak` raises if a block is leaked
    tables: tuple[tuple[str, Counter[Any]], ...] = (
        ("path", tally.paths), ("attempts", tally.attempts), ("error", tally.typed), ("fault", faults)
    )  # fmt: skip
    for what, counts in tables:
        for name, number in sorted(counts.items()):
            report.add(Line(f"{what}: {name}", number, "times" if counts is faults else "requests"))
    report.write()
    if tally.wrong or tally.endless:
        sys.exit("the soak failed")


if __name__ == "__main__":
    main()
