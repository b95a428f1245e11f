"""The reports of 64 prefill and 64 decode workers, and a router that follows them, each in a process of its own.

    start     the fleet: each worker has the production `ReportFeed` behind a gRPC server
    follow    the router: follows the workers with production `WorkerLink`s

A busy decode worker generates 3,200 tokens a second; a busy prefill worker computes 10,000.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import uvloop

from benchmarks.processes import obey, take_stdout
from core.config import RouterConfig, WorkerConfig
from core.handoff import LIVE_STATES, AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole, WorkerState
from core.paths import Lane, PathState, PathStatus
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored, Column
from core.scheduling.worker_load import RouterCalls, WorkerChanges, WorkerLoad
from core.service import Endpoint
from protos import codec, report_codec
from router.links.worker_link import WorkerLink
from router.requests import events
from router.requests.machine import RouterMachine
from router.shell import report_interval_ms
from runtime.driver import Driver
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, GrpcServer
from runtime.rpc.security import OPEN, WORKER_RULES
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.reports import ReportFeed
from worker.view import ChangeTracker

ROLES = (ServiceRole.PREFILL, ServiceRole.DECODE)
NUM_WORKERS = 64  # of each role
BLOCK_SIZE, NUM_BLOCKS = 16, 8192
TOKENS_PER_S = {ServiceRole.PREFILL: 10_000, ServiceRole.DECODE: 3_200}  # of a busy worker
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, block_size=BLOCK_SIZE, head_dim=128)
LOAD = WorkerLoad(
    WorkerState.SERVING, ledger=dict.fromkeys(Column, NUM_BLOCKS // 5), transfers=dict.fromkeys(LIVE_STATES, 3)
)
PATHS = tuple(PathStatus(f"peer-{n}", PathState.FINE, Lane.RDMA, 2e10, 2.5e10, 1e-5) for n in range(8))
JOIN_TIMEOUT_S = 60.0
SETTLE_S = 0.5

Addresses = list[tuple[str, str, str]]  # (worker id, address, role)


def agent(number: int) -> AgentAddress:
    return AgentAddress(f"worker-{number}", number + 1, b"", 0, NUM_BLOCKS, LAYOUT, 10.0)


class FleetWorker:
    """The report feed of one worker, whose cache and load change by themselves if it is busy."""

    def __init__(self, number: int, role: ServiceRole, is_busy: bool, config: WorkerConfig) -> None:
        self._worker_id = f"{role.value}-{number}"
        self._number, self._role, self._is_busy = number, role, is_busy
        self._tracker = ChangeTracker()
        self._load = LOAD
        self._is_watched = False
        self._next_hash = (number + 1) << 40
        self._feed = ReportFeed(config, self._snapshot, self._changes, worker_pb2.DescribeLedgerResponse, print)

    async def serve(self) -> tuple[str, str, str]:
        self._server = server = GrpcServer("127.0.0.1", 0, MAX_GRPC_MESSAGE_BYTES, OPEN, WORKER_RULES)
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._feed, "tandem.v1.Worker")
        if self._role is ServiceRole.DECODE:
            server.add(worker_pb2_grpc.add_DecodeWorkerServicer_to_server, NoTokens(), "tandem.v1.DecodeWorker")
        return self._worker_id, await server.start(), self._role.value

    async def run(self) -> None:
        """The workers begin at different times of the interval, like those of a real fleet."""
        await asyncio.sleep(self._feed.interval_s * self._number / NUM_WORKERS)
        await self._feed.run()

    def _snapshot(self) -> worker_pb2.WorkerReport:
        self._is_watched = True
        self._feed.mark_changed()
        report = report_codec.encode_changes(WorkerChanges(self._load, paths=PATHS))
        report.snapshot.worker_id, report.snapshot.role = self._worker_id, codec.ROLE_TO_WIRE[self._role]
        report.snapshot.agent.CopyFrom(codec.encode_agent(agent(self._number)))
        report.snapshot.cached_blocks.extend(range(self._next_hash - NUM_BLOCKS // 2, self._next_hash))
        return report

    def _changes(self) -> worker_pb2.WorkerReport | None:
        block_events: list[BlockEvent] = []
        if self._is_busy and self._is_watched:
            block_events = self._work()
            self._feed.mark_changed()  # the next report comes after one interval
        changes = self._tracker.take(self._load, block_events, PATHS)
        return None if changes is None else report_codec.encode_changes(changes)

    def _work(self) -> list[BlockEvent]:
        """The work of one report interval. As many blocks leave the full cache as enter it."""
        num_tokens = int(TOKENS_PER_S[self._role] * self._feed.interval_s)
        done = "num_prefilled_tokens" if self._role is ServiceRole.PREFILL else "num_sampled_tokens"
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


class NoTokens(worker_pb2_grpc.DecodeWorkerServicer):
    async def StreamTokens(
        self, _: worker_pb2.StreamTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await context.write(worker_pb2.StepTokens())
        await asyncio.Event().wait()


async def start_fleet(is_busy: bool) -> tuple[Addresses, list[asyncio.Task[None]]]:
    config = WorkerConfig()
    workers = [FleetWorker(number, role, is_busy, config) for role in ROLES for number in range(NUM_WORKERS)]
    addresses = [await worker.serve() for worker in workers]
    return addresses, [asyncio.create_task(worker.run()) for worker in workers]


async def follow(addresses: Addresses, seconds: float) -> tuple[float, float]:
    """The share of a core that a router takes for reports, and the reports a second."""
    machine = RouterMachine(RouterConfig(), lambda: 1)
    num_reports = 0
    all_joined = asyncio.Event()

    def fail(error: BaseException) -> None:
        raise error

    def post(event: events.RouterEvent) -> None:
        nonlocal num_reports
        num_reports += isinstance(event, events.WorkerReported)
        driver.post(event)
        if not all_joined.is_set() and len(list(machine.workers)) == len(addresses):
            all_joined.set()

    def is_known(worker_id: str) -> bool:
        return machine.workers.get(worker_id) is not None

    driver: Driver[Any, Any] = Driver(machine, lambda _: None, fail)
    endpoints = [Endpoint(worker_id, address, ServiceRole(role)) for worker_id, address, role in addresses]
    interval_ms = report_interval_ms(len(endpoints))
    links = [WorkerLink(endpoint, "router", post, is_known, OPEN, interval_ms) for endpoint in endpoints]
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await all_joined.wait()
        await asyncio.sleep(SETTLE_S)
        num_before, began, used = num_reports, time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return (time.process_time() - used) / took, (num_reports - num_before) / took
    finally:
        driver.stop()
        with suppress(Exception):
            await asyncio.gather(*(link.close() for link in links))


class Program:
    """Each public method is a command, called on a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: list[asyncio.Task[None]] = []

    def start(self, is_busy: bool) -> Addresses:
        addresses, self._running = asyncio.run_coroutine_threadsafe(start_fleet(is_busy), self._loop).result()
        return addresses

    def follow(self, addresses: Addresses, seconds: float) -> tuple[float, float]:
        return asyncio.run_coroutine_threadsafe(follow(addresses, seconds), self._loop).result()


async def serve() -> None:
    await asyncio.to_thread(obey, Program(asyncio.get_running_loop()), take_stdout())


if __name__ == "__main__":
    uvloop.run(serve())
