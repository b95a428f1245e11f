"""Measures a router with 64 prefill and 64 decode workers: the cost of each decision, and of the reports.

    python -m benchmarks.decisions

`decision_cost` posts requests with prompts of 8,000 tokens to a `RouterMachine`. A third of the prompts is cached deep
on a few workers, a third shares its first block with every worker, a third is cached nowhere. The cost is the CPU time
of the thread from the arrival of a request until its calls are decided, with packing and hashing of the prompt.

`report_cost` runs the reports of 128 workers in a child process, each with the production `ReportFeed` behind a gRPC
server of its own. Another child process, the router, follows them with production `WorkerLink`s. The cost is the CPU
time of the router.
A busy decode worker generates 3,200 tokens a second; a busy prefill worker computes 10,000.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import uvloop

from core.block_hash import sequence_hashes
from core.config import RouterConfig, WorkerConfig
from core.handoff import LIVE_STATES, AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole, WorkerState
from core.paths import Lane, PathState, PathStatus
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored, Column
from core.scheduling.worker_load import RouterCalls, WorkerChanges, WorkerLoad
from core.service import Endpoint
from protos import codec, report_codec
from router.links.worker_link import WorkerLink
from router.requests import events
from router.requests.machine import RouterMachine
from runtime.driver import Driver
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, GrpcServer
from runtime.rpc.security import OPEN, WORKER_RULES
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.reports import ReportFeed
from worker.view import ChangeTracker

ROLES = (ServiceRole.PREFILL, ServiceRole.DECODE)
NUM_WORKERS = 64  # of each role
BLOCK_SIZE = 16
NUM_BLOCKS = 8192
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, block_size=BLOCK_SIZE, head_dim=128)
PROMPT_TOKENS = 8000
NUM_CONVERSATIONS = 96
HOLDERS = 3  # workers of each role that have cached a conversation
REPORTED_PATHS = 8
SHARED = list(range(BLOCK_SIZE))  # the tokens of the first block of two thirds of the prompts

CACHED, SHARED_BLOCK, UNKNOWN = "cached deep", "first block cached", "not cached"


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Seconds of CPU time for one decision."""

    p50_s: float
    p99_s: float
    p50_by_kind_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class ReportCost:
    share_of_core: float  # of the router's process
    reports_per_s: float


def decision_cost(num_decisions: int = 1500, num_prompts: int = 30) -> DecisionCost:
    """Each prompt of each kind is priced several times, under other loads. The queue is empty."""
    chance = random.Random(1)
    config = RouterConfig(max_in_flight_per_worker=1024)
    machine = RouterMachine(config, lambda: chance.getrandbits(128))
    prompts = _fill(machine, chance, num_prompts)
    seconds: dict[str, list[float]] = {kind: [] for kind in prompts}
    gc.collect()
    for number in range(num_decisions):
        kind = chance.choice(list(prompts))
        token_ids = chance.choice(prompts[kind])
        request = Request(f"r{number}", token_ids, PROMPT_TOKENS, SamplingParams(max_tokens=64))
        arrived = events.RequestArrived(request, 1.0, 100.0)
        started = time.thread_time()
        actions = machine.handle(arrived, 1.0)
        seconds[kind].append(time.thread_time() - started)
        assert actions, "the request found no worker"
        if number % 4:  # some stay, so that the loads differ
            machine.handle(events.ClientCancelled(request.request_id), 1.0)
    every = sorted(second for of_kind in seconds.values() for second in of_kind)
    return DecisionCost(
        p50_s=every[len(every) // 2],
        p99_s=every[len(every) * 99 // 100],
        p50_by_kind_s={kind: statistics.median(of_kind) for kind, of_kind in seconds.items()},
    )


def _fill(machine: RouterMachine, chance: random.Random, num_prompts: int) -> dict[str, list[tuple[int, ...]]]:
    """Join the workers with loads and caches. Returns prompts of each kind."""

    def draw_prompt(shared: bool) -> tuple[int, ...]:
        drawn = [chance.randrange(1000, 128_000) for _ in range(PROMPT_TOKENS)]
        return tuple(SHARED + drawn[BLOCK_SIZE:] if shared else drawn)

    conversations = [draw_prompt(shared=True) for _ in range(NUM_CONVERSATIONS)]
    known = [sequence_hashes(prompt, BLOCK_SIZE) for prompt in conversations]
    for role in ROLES:
        caches: list[set[int]] = [{known[0][0]} for _ in range(NUM_WORKERS)]
        for chain in known:
            for worker in chance.sample(range(NUM_WORKERS), HOLDERS):
                caches[worker].update(chain[: chance.randrange(len(chain) // 2, len(chain) + 1)])
        for number, cached in enumerate(caches):
            load = replace(LOAD, num_queued_tokens=chance.randrange(20_000), num_calls=chance.randrange(64))
            machine.handle(
                events.WorkerJoined(f"{role.value}-{number}", role, _agent(number), tuple(cached), load), 1.0
            )
    return {
        CACHED: conversations[:num_prompts],
        SHARED_BLOCK: [draw_prompt(shared=True) for _ in range(num_prompts)],
        UNKNOWN: [draw_prompt(shared=False) for _ in range(num_prompts)],
    }


LOAD = WorkerLoad(
    WorkerState.SERVING, ledger=dict.fromkeys(Column, NUM_BLOCKS // 5), transfers=dict.fromkeys(LIVE_STATES, 3)
)


def _agent(number: int) -> AgentAddress:
    return AgentAddress(f"worker-{number}", number + 1, b"", 0, NUM_BLOCKS, LAYOUT, 10.0)


# ---- the reports of a fleet


class _FleetWorker:
    """The report feed of one worker, whose cache and load change by themselves if it is busy."""

    def __init__(self, number: int, role: ServiceRole, busy: bool, config: WorkerConfig) -> None:
        self.worker_id = f"{role.value}-{number}"
        self.endpoint = Endpoint("", "", role)
        self._number, self._role, self._busy, self._config = number, role, busy, config
        self._tracker = ChangeTracker()
        self._load = LOAD
        self._is_watched = False
        self._next_hash = (number + 1) << 40
        self._paths = tuple(
            PathStatus(f"peer-{peer}", PathState.FINE, Lane.RDMA, 2e10, 2.5e10, 1e-5) for peer in range(REPORTED_PATHS)
        )
        self.feed = ReportFeed(config, self._snapshot, self._changes, worker_pb2.DescribeLedgerResponse, print)

    async def serve(self) -> Endpoint:
        self._server = server = GrpcServer("127.0.0.1", 0, MAX_GRPC_MESSAGE_BYTES, OPEN, WORKER_RULES)
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self.feed, "tandem.v1.Worker")
        if self._role is ServiceRole.DECODE:
            tokens = _NoTokens()
            server.add(worker_pb2_grpc.add_DecodeWorkerServicer_to_server, tokens, "tandem.v1.DecodeWorker")
        return Endpoint(self.worker_id, await server.start(), self._role)

    async def run(self) -> None:
        """The workers begin at different times of the interval, like those of a real fleet."""
        await asyncio.sleep(self._config.report_interval_s * self._number / NUM_WORKERS)
        await self.feed.run()

    def _snapshot(self) -> worker_pb2.WorkerReport:
        self._is_watched = True
        self.feed.mark_changed()
        report = report_codec.encode_changes(WorkerChanges(self._load, paths=self._paths))
        report.snapshot.worker_id, report.snapshot.role = self.worker_id, codec.ROLE_TO_WIRE[self._role]
        report.snapshot.agent.CopyFrom(codec.encode_agent(_agent(self._number)))
        report.snapshot.cached_blocks.extend(range(self._next_hash - NUM_BLOCKS // 2, self._next_hash))
        return report

    def _changes(self) -> worker_pb2.WorkerReport | None:
        block_events: list[BlockEvent] = []
        if self._busy and self._is_watched:
            block_events = self._work()
            self.feed.mark_changed()  # the next report comes after one interval
        changes = self._tracker.take(self._load, block_events, self._paths)
        return None if changes is None else report_codec.encode_changes(changes)

    def _work(self) -> list[BlockEvent]:
        """The work of one report interval. As many blocks leave the full cache as enter it."""
        prefill = self._role is ServiceRole.PREFILL
        num_tokens = int((10_000 if prefill else 3_200) * self._config.report_interval_s)
        done = "num_prefilled_tokens" if prefill else "num_sampled_tokens"
        self._load = replace(
            self._load,
            **{done: getattr(self._load, done) + num_tokens},
            num_queued_tokens=(self._load.num_queued_tokens + 777) % 20_000,
            num_calls=64,
            router_calls={"router": RouterCalls(self._load.num_queued_tokens, 64)},
        )
        stored = range(self._next_hash, self._next_hash + num_tokens // BLOCK_SIZE)
        self._next_hash = stored.stop
        return [*(BlockRemoved(new - NUM_BLOCKS // 2) for new in stored), *map(BlockStored, stored)]


class _NoTokens(worker_pb2_grpc.DecodeWorkerServicer):
    async def StreamTokens(
        self, _: worker_pb2.StreamTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await context.write(worker_pb2.StepTokens())
        await asyncio.Event().wait()


def _run_fleet(connection: Connection, busy: bool, config: WorkerConfig) -> None:
    """The child process. Sends the endpoints, and ends when it is killed."""

    async def run() -> None:
        workers = [_FleetWorker(number, role, busy, config) for role in ROLES for number in range(NUM_WORKERS)]
        connection.send([await worker.serve() for worker in workers])
        await asyncio.gather(*(worker.run() for worker in workers))

    uvloop.run(run())


def report_cost(busy: bool, seconds: float = 5.0, config: WorkerConfig | None = None) -> ReportCost:
    """The cost at the intervals of `config`."""
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(target: Callable[..., None], *args: object) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        processes.append(process)
        theirs.close()  # so that the death of the child ends `recv`
        return ours

    try:
        endpoints = start(_run_fleet, busy, config or WorkerConfig()).recv()
        cost: ReportCost = start(_run_router, endpoints, seconds).recv()
        return cost
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_router(connection: Connection, endpoints: list[Endpoint], seconds: float) -> None:
    """The child process that is measured."""
    connection.send(uvloop.run(_follow_fleet(endpoints, seconds)))


async def _follow_fleet(endpoints: list[Endpoint], seconds: float) -> ReportCost:
    machine = RouterMachine(RouterConfig(), lambda: 1)
    num_reports = 0
    all_joined = asyncio.Event()

    def fail(error: BaseException) -> None:
        raise error

    def post(event: events.RouterEvent) -> None:
        nonlocal num_reports
        num_reports += isinstance(event, events.WorkerReported)
        driver.post(event)
        if not all_joined.is_set() and len(list(machine.workers)) == len(endpoints):
            all_joined.set()

    def is_known(worker_id: str) -> bool:
        return machine.workers.get(worker_id) is not None

    driver: Driver[Any, Any] = Driver(machine, lambda _: None, fail)
    links = [WorkerLink(endpoint, "router", post, is_known, OPEN) for endpoint in endpoints]
    try:
        async with asyncio.timeout(60.0):
            await all_joined.wait()
        await asyncio.sleep(0.5)
        num_before, began, used = num_reports, time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        took, used = time.monotonic() - began, time.process_time() - used
        return ReportCost(used / took, (num_reports - num_before) / took)
    finally:
        driver.stop()
        with suppress(Exception):
            await asyncio.gather(*(link.close() for link in links))


def main() -> None:
    decisions = decision_cost()
    print(f"decision: p50 {decisions.p50_s * 1e3:.3f} ms, p99 {decisions.p99_s * 1e3:.3f} ms")
    for kind, p50_s in decisions.p50_by_kind_s.items():
        print(f"    {kind}: p50 {p50_s * 1e3:.3f} ms")
    measures: list[tuple[str, Callable[[], ReportCost]]] = [
        ("idle", lambda: report_cost(busy=False)),
        ("busy", lambda: report_cost(busy=True)),
    ]
    for name, measure in measures:
        cost = measure()
        print(f"reports of {2 * NUM_WORKERS} {name} workers: {cost.share_of_core:.1%} of a core, "
              f"{cost.reports_per_s:,.0f} reports/s")  # fmt: skip


if __name__ == "__main__":
    main()
