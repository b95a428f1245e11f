"""One measured process: `python -m benchmarks.dataplane.program ROLE`, where ROLE is a `Role` as JSON.

A decode worker, a router, or a bare gRPC server. It obeys the commands of `Service`. Workers and routers start as in a
fleet, in a `ServiceHost` on uvloop.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, TextIO

import grpc.aio
import uvloop

from benchmarks.dataplane.sleeping_runner import SleepingRunner, token_id_at
from benchmarks.processes import obey, take_stdout
from cli.compose import build_decode_worker, build_router
from core.config import EngineConfig, GatewayConfig, RouterConfig, SchedulerConfig, TandemConfig, TransferConfig
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from core.service import Endpoint
from engine import factory
from fleet.service_host import Placement, ServiceHost, StartFault
from model_files.model_source import describe, resolve_model
from tandem_client.stubs import inference_pb2, inference_pb2_grpc

BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
MAX_STREAMS = 1024
CONFIG = TandemConfig(
    engine=EngineConfig(block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_batched_tokens=8192, max_running=MAX_STREAMS, max_waiting=MAX_STREAMS),
    transfer=TransferConfig(transport="memory"),
    router=RouterConfig(port=0, max_queued=2 * MAX_STREAMS, max_in_flight_per_worker=MAX_STREAMS),
)
BUILDERS = {"worker": build_decode_worker, "router": build_router}


@dataclass(frozen=True, slots=True)
class Role:
    name: str  # "worker", "router" or "bare"
    core: int | None  # None: every core
    ordinal: int = 0
    # Of a worker: the time of one step; None = the default model computes. Of a bare server: 0 = as fast as it can.
    step_s: float | None = 0.0
    tokens_per_message: int = 1  # of a bare server
    http_port: int = 0  # of a router; 0 = no HTTP


class BareInference(inference_pb2_grpc.InferenceServicer):
    """The messages of a router without a router: what grpc.aio alone can send.

    With `step_s`, each call sends a message at the end of each step, and its token ids tell when that was.
    """

    def __init__(self, tokens_per_message: int, step_s: float) -> None:
        self._tokens_per_message, self._step_s = tokens_per_message, step_s
        self._step: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if step_s:
            self._stepping = asyncio.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            ended, self._step = self._step, asyncio.get_running_loop().create_future()
            ended.set_result(token_id_at(time.monotonic()))

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        num_tokens = self._tokens_per_message
        for index in range(0, request.stop.max_tokens, num_tokens):
            token_id = await asyncio.shield(self._step) if self._step_s else index
            chunk = inference_pb2.TokenChunk(index=index, token_ids=[token_id] * num_tokens, text=" word" * num_tokens)
            await context.write(inference_pb2.GenerateResponse(tokens=chunk))


async def start_bare(role: Role) -> Endpoint:
    server = grpc.aio.server()
    servicer = BareInference(role.tokens_per_message, role.step_s or 0.0)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    SERVERS.append(server)
    return Endpoint("bare", f"127.0.0.1:{port}", ServiceRole.ROUTER)


SERVERS: list[Any] = []  # a server that nothing refers to stops


async def start_service(host: ServiceHost, role: Role) -> Endpoint:
    config = replace(CONFIG, gateway=GatewayConfig(port=role.http_port))
    placement = Placement(ordinal=role.ordinal, host="", address="", num_threads=1, control=None)
    endpoint = await host.start(pickle.dumps(functools.partial(BUILDERS[role.name], config)), placement)
    if isinstance(endpoint, StartFault):
        raise RuntimeError(endpoint.reason)
    return endpoint


def build_sleeping_runner(step_s: float) -> SleepingRunner:
    info = describe(resolve_model(CONFIG.engine.model), CONFIG.engine.max_context)
    layout = KVLayout(
        model=info.fingerprint, dtype="bfloat16", num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2
    )
    return SleepingRunner(info, NUM_BLOCKS, layout, step_s)


class Service:
    """Each public method is a command, called on a thread."""

    def __init__(self, host: ServiceHost, endpoint: Endpoint) -> None:
        self._host, self._endpoint, self._loop = host, endpoint, asyncio.get_running_loop()

    def endpoint(self) -> dict[str, str]:
        return {"id": self._endpoint.service_id, "address": self._endpoint.address}

    def follow(self, workers: list[dict[str, str]]) -> None:
        """The router's fleet: the endpoints of decode workers."""
        followed = [Endpoint(w["id"], w["address"], ServiceRole.DECODE) for w in workers]
        asyncio.run_coroutine_threadsafe(self._host.set_fleet(followed, routers=[]), self._loop).result()

    def step_times(self) -> dict[str, float]:
        worker: Any = self._host._service
        executor = worker._parts.executor
        return {"step_s": executor.step_seconds, "idle_s": executor.idle_seconds}


async def serve(role: Role, answers: TextIO) -> None:
    if (step_s := role.step_s) is not None:
        factory.build_runner = lambda *_, **__: build_sleeping_runner(step_s)
    host = ServiceHost()
    endpoint = await (start_bare(role) if role.name == "bare" else start_service(host, role))
    await asyncio.to_thread(obey, Service(host, endpoint), answers)
    await host.stop()


if __name__ == "__main__":
    uvloop.run(serve(Role(**json.loads(sys.argv[1])), take_stdout()))
