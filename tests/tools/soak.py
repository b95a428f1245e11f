"""20,000 requests through a transport that fails one operation in ten, then 10,000 more while workers are replaced one
after the other: `make soak`.

Two prefill and two decode workers in one process: real gRPC, agents and machines, the fake runner (one wrong byte of KV
makes its tokens wrong), and a memory transport whose faults come from a seed. Half of the faults are errors of the
call, and one error in four reports that the peer is gone. The other half are silent: a notification lost, doubled or
late, a read with a wrong bit.

The soak fails if a token is wrong, a request does not end, or a block is leaked. It also fails if the second half of
the requests makes a container, the memory of the process or the number of its descriptors grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import Line, Report
from cli import compose
from core.errors import PeerDisconnected, TransportError
from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, place, transfers
from tests.support.faults import Stream, expected, fault_config, prompt_of
from tests.support.live_objects import Footprint, growth
from tests.support.steps import slow_down
from worker.service import WorkerService

NUM_PROMPTS = 400  # some requests share a prefix with others
TIMEOUT_S = 30.0
STEP_S = 0.005  # while workers are replaced: else few sequences run when a drain begins
MAX_NEW_DESCRIPTORS = 8
MAX_GROWTH_MB = 64.0  # the caches of prompts and of expected tokens still fill in the second half
ODD_FATES: tuple[tuple[str, Sequence[int]], ...] = (("lost", ()), ("doubled", (0, 0)), ("late", (20,)))


class UnreliableFabric(MemoryFabric):
    """Transports call this with the fabric's lock held, so one random generator serves all threads."""

    def __init__(self, fault_rate: float, seed: int) -> None:
        super().__init__()
        self.fault_rate = fault_rate
        self.num_operations = 0
        self._random = random.Random(seed)
        self.fate = self._odd_fate

    def _strikes(self) -> bool:
        return self._random.random() < self.fault_rate / 2

    def reach(self, name: str) -> MemoryTransport:
        """Every connect, read and notification begins here."""
        self.num_operations += 1
        if not self._strikes():
            return super().reach(name)
        if self._random.random() < 0.25:
            self.faults_done["peer gone"] += 1
            raise PeerDisconnected(f"{name} is gone")
        self.faults_done["error"] += 1
        raise TransportError("this operation fails")

    def _odd_fate(self, _sender: str, _receiver: str, _payload: bytes) -> Sequence[int]:
        if not self._strikes():
            return (0,)
        name, fate = self._random.choice(ODD_FATES)
        self.faults_done[name] += 1
        return fate

    def copy(self, source: PoolMemory, target: PoolMemory, runs: Sequence[ByteRun]) -> None:
        super().copy(source, target, runs)
        if self._strikes():
            run = self._random.choice(runs)
            assert target.view is not None
            target.view[run.target + self._random.randrange(run.num_bytes)] ^= 1 << self._random.randrange(8)
            self.faults_done["flipped bit"] += 1


@dataclass
class Tally:
    right: int = 0
    wrong: int = 0
    endless: int = 0
    typed: Counter[str] = field(default_factory=Counter)  # by gRPC code
    paths: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)

    def count(self, stream: Stream) -> None:
        answer, wanted = stream.answer, expected(stream.prompt, stream.num_output)
        if answer.token_ids != wanted[: stream.num_tokens] or answer.indices != list(range(stream.num_tokens)):
            self.wrong += 1
        elif stream.code is not None:
            self.typed[stream.code.name] += 1
        elif answer.finished is None or stream.num_tokens != stream.num_output:
            self.wrong += 1
        else:
            self.right += 1
            self.paths[inference_pb2.RequestPath.Name(answer.finished.path)] += 1
            self.attempts[answer.finished.attempts] += 1


async def one_client(
    deployment: Deployment, tally: Tally, generator: random.Random, num_requests: int, longest: int
) -> None:
    for _ in range(num_requests):
        prompt = prompt_of(generator.randrange(NUM_PROMPTS), generator.randrange(1, 100))
        stream = Stream(deployment.inference, prompt, generator.randrange(1, longest), TIMEOUT_S)
        try:
            await stream.end()
        except TimeoutError:
            tally.endless += 1
        else:
            tally.count(stream)


async def roll(deployment: Deployment, faults: Counter[str]) -> None:
    """Replace one worker after the other until cancelled: a new one serves, then the old one drains and goes."""
    async with contextlib.AsyncExitStack() as stack:
        for number in itertools.count(2):
            is_decode = number % 2 == 0
            pool = deployment.decode if is_decode else deployment.prefill
            build = compose.build_decode_worker if is_decode else compose.build_prefill_worker
            old, new = pool[0], build(deployment.config, place(number))
            stack.push_async_callback(new.stop)
            deployment.endpoints[id(new)] = await new.start()
            slow_down(new, STEP_S)
            pool.append(new)
            await publish(deployment)
            await publish(deployment, leaving=old)
            await old.drain(TIMEOUT_S)
            pool.remove(old)
            await publish(deployment)
            await old.stop()
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
    compose.FABRIC = fabric = UnreliableFabric(0.0, seed)
    tally = Tally()

    async def answer(part: int, num_requests: int, longest: int = 12) -> None:
        shares = [num_requests // num_clients + (n < num_requests % num_clients) for n in range(num_clients)]
        fabric.fault_rate = fault_rate  # only from here on, so that the workers can connect
        await asyncio.gather(*(
            one_client(deployment, tally, random.Random(seed * 997 + part * num_clients + n), share, longest)
            for n, share in enumerate(shares)
        ))  # fmt: skip
        fabric.fault_rate = 0.0
        await deployment.settle()

    async with deploy(fault_config(), num_prefill=2, num_decode=2) as deployment:
        footprints = []
        for half in range(2):
            await answer(half, num_requests // 2)
            footprints.append(Footprint.now())
        at_half_time, at_the_end = footprints
        check_flat(at_half_time, at_the_end, num_requests // 2)
        ended = sum((transfers(worker).counters.pulls for worker in deployment.decode), Counter[str]())
        if num_rolling:
            for worker in deployment.workers:
                slow_down(worker, STEP_S)
            rolling = asyncio.create_task(roll(deployment, fabric.faults_done))
            await answer(2, num_rolling, longest=40)
            rolling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rolling
        del fabric.faults_done["fate"]  # the transport's own sum of lost, doubled and late messages
        fabric.faults_done["(operations)"] = fabric.num_operations
        fabric.faults_done.update({f"(pulls {state})": count for state, count in ended.items()})
    return tally, fabric.faults_done


def check_flat(before: Footprint, after: Footprint, num_requests: int) -> None:
    """Raises `AssertionError` if so much grew that one request in a hundred must have left something behind."""
    most = max(20, num_requests // 100)
    grown = {name: count for name, count in growth(before.live, after.live).items() if count > most}
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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16, help="requests at one time")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        tally, faults = asyncio.run(
            soak(arguments.requests, arguments.fault_rate, arguments.seed, arguments.clients, arguments.rolling)
        )
    except AssertionError as error:
        sys.exit(f"leaked: {error}")
    report = Report("soak")
    count = f"{arguments.requests} + {arguments.rolling} requests"
    report.say(f"{count}, seed {arguments.seed}, fault rate {arguments.fault_rate:g}")
    report.add(Line("all requests took", time.monotonic() - start, "s"))
    report.add(Line("right to the last token", tally.right, "requests"))
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
