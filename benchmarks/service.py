"""Measured services, each a process of its own: a decode or prefill worker, a router, or a bare gRPC server.

    benchmark: MeasuredProcess  --commands-->  `python -m benchmarks.service ROLE`: Service

All but the model is real: a step sleeps for `Role.step_s`, as on a GPU that leaves the cores to others. Workers and
routers start as in a fleet, in a `ServiceHost` on uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import grpc.aio
import uvloop

from benchmarks.processes import ChildProcess, obey, take_stdout
from benchmarks.sleeping_runner import SleepingRunner, token_id_at
from cli.compose import build_decode_worker, build_prefill_worker, build_router
from core.config import (
    CacheConfig,
    EngineConfig,
    GatewayConfig,
    RouterConfig,
    SchedulerConfig,
    TandemConfig,
    TransferConfig,
)
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from core.service import Endpoint
from engine import factory
from fleet.host.service_host import Placement, ServiceHost, StartFault
from model_files.model_source import describe, resolve_model
from tandem_client.stubs import inference_pb2, inference_pb2_grpc

BLOCK_SIZE = 16
MAX_STREAMS = 1024
CONFIG = TandemConfig(
    engine=EngineConfig(block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_batched_tokens=8192, max_running=MAX_STREAMS, max_waiting=MAX_STREAMS),
    router=RouterConfig(port=0, max_queued=2 * MAX_STREAMS, max_in_flight_per_worker=MAX_STREAMS),
)
BUILDERS = {"decode": build_decode_worker, "prefill": build_prefill_worker, "router": build_router}


@dataclass(frozen=True, slots=True)
class Role:
    name: str  # "decode", "prefill", "router" or "bare"
    core: int | None = None  # None: every core
    ordinal: int = 0
    # Of a worker: the time of one step; None = the default model computes. Of a bare server: 0 = as fast as it can.
    step_s: float | None = 0.0
    token_s: float = 0.0  # of a worker: what each prompt token adds to the time of a step
    num_blocks: int = 65_536  # of a worker's pool
    moves_kv: bool = False  # the pool has the layout of the default model, and its blocks move over nixl with digests
    http_port: int = 0  # of a router; 0 = no HTTP
    local_prefill: str = "auto"  # of a router
    peer_prefixes: str = "never"  # of a router
    disk_dir: str = ""  # of a worker: where its KV lies below the pool; empty = nowhere


# ---- the benchmark's side


class MeasuredProcess(ChildProcess):
    def __init__(self, role: Role) -> None:
        self.role = role
        self.draining = False
        command = [sys.executable, "-m", "benchmarks.service", json.dumps(asdict(role))]
        super().__init__(f"{role.name}-{role.ordinal}", command, core=role.core)

    @functools.cached_property
    def endpoint(self) -> dict[str, str]:
        """The id, the address and the role of its service."""
        found: dict[str, str] = self.call("endpoint")
        return found

    @property
    def address(self) -> str:
        return self.endpoint["address"]

    def follow(self, workers: Sequence[MeasuredProcess]) -> None:
        """For a router: these are the workers of the fleet."""
        self.call("follow", workers=[worker.endpoint | {"draining": worker.draining} for worker in workers])

    def step_times(self) -> dict[str, float]:
        """For a worker: seconds in steps and between steps, since the start."""
        found: dict[str, float] = self.call("step_times")
        return found


@contextlib.contextmanager
def running(*roles: Role) -> Iterator[list[MeasuredProcess]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for role in roles:
            processes.append(MeasuredProcess(role))
            stack.callback(processes[-1].stop)
        for process in processes:
            process.wait_until_ready()
        yield processes


def cores() -> tuple[int, int]:
    """The core of the measured process, and the core of everything else; the same on a machine with one core."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


@contextlib.contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Run this process on `core` inside the `with` block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- the process of a service


class BareInference(inference_pb2_grpc.InferenceServicer):
    """The messages of a router without a router: what grpc.aio alone can send.

    With `step_s`, each call sends a message at the end of each step, and its token ids tell when that was.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if step_s:
            self._stepping = asyncio.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            ended, self._step = self._step, asyncio.get_running_loop().create_future()
            ended.set_result(token_id_at(time.monotonic()))

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        for index in range(request.stop.max_tokens):
            token_id = await asyncio.shield(self._step) if self._step_s else index
            chunk = inference_pb2.TokenChunk(index=index, token_ids=[token_id], text=" word")
            await context.write(inference_pb2.GenerateResponse(tokens=chunk))


async def start_bare(role: Role) -> Endpoint:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(BareInference(role.step_s or 0.0), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    SERVERS.append(server)
    return Endpoint("bare", f"127.0.0.1:{port}", ServiceRole.ROUTER)


SERVERS: list[Any] = []  # a server that nothing refers to stops


def build_sleeping_runner(role: Role, step_s: float) -> SleepingRunner:
    info = describe(resolve_model(CONFIG.engine.model), CONFIG.engine.max_context)
    num_layers, num_kv_heads, head_dim = (30, 3, 64) if role.moves_kv else (1, 1, 2)
    layout = KVLayout(info.fingerprint, "bfloat16", num_layers, num_kv_heads, BLOCK_SIZE, head_dim)
    return SleepingRunner(info, role.num_blocks, layout, step_s, role.token_s)


async def start_service(host: ServiceHost, role: Role) -> Endpoint:
    if (step_s := role.step_s) is not None:
        factory.build_runner = lambda *_, **__: build_sleeping_runner(role, step_s)
    transfer = TransferConfig() if role.moves_kv else TransferConfig(transport="memory")
    cache = CacheConfig(disk_gb=2.0 if role.disk_dir else 0.0, disk_dir=role.disk_dir)
    router = replace(CONFIG.router, local_prefill=role.local_prefill, peer_prefixes=role.peer_prefixes)
    gateway = GatewayConfig(port=role.http_port)
    config = replace(CONFIG, transfer=transfer, gateway=gateway, cache=cache, router=router)
    placement = Placement(ordinal=role.ordinal, host="", address="", num_threads=1, control=None)
    endpoint = await host.start(pickle.dumps(functools.partial(BUILDERS[role.name], config)), placement)
    if isinstance(endpoint, StartFault):
        raise RuntimeError(endpoint.reason)
    return replace(endpoint, role=ServiceRole(role.name))


class Service:
    """Each public method is a command, called on a thread."""

    def __init__(self, host: ServiceHost, endpoint: Endpoint) -> None:
        self._host, self._endpoint, self._loop = host, endpoint, asyncio.get_running_loop()

    def endpoint(self) -> dict[str, str]:
        return {"id": self._endpoint.service_id, "address": self._endpoint.address, "role": self._endpoint.role.value}

    def follow(self, workers: list[dict[str, Any]]) -> None:
        followed = [Endpoint(w["id"], w["address"], ServiceRole(w["role"]), draining=w["draining"]) for w in workers]
        self._wait(self._host.set_fleet(followed, routers=[]))

    def drain(self, timeout_s: float) -> None:
        """As the supervisor drains a worker."""
        worker: Any = self._host._service
        self._wait(worker.drain(timeout_s))

    def step_times(self) -> dict[str, float]:
        worker: Any = self._host._service
        executor = worker._parts.executor
        return {"step_s": executor.step_seconds, "idle_s": executor.idle_seconds}

    def counters(self) -> dict[str, float]:
        worker: Any = self._host._service
        load = worker._parts.machine.load()
        return {"read_bytes": load.transferred_bytes, "disk_writes": load.num_disk_writes}

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def serve(role: Role, answers: TextIO) -> None:
    host = ServiceHost()
    endpoint = await (start_bare(role) if role.name == "bare" else start_service(host, role))
    await asyncio.to_thread(obey, Service(host, endpoint), answers)
    await host.stop()


if __name__ == "__main__":
    uvloop.run(serve(Role(**json.loads(sys.argv[1])), take_stdout()))
