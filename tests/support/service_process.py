"""Services, each a process of its own: a decode or prefill worker, a router, or a bare gRPC server.

    benchmark or test: ServiceProcess  --commands-->  `python -m tests.support.service_process ROLE`: HostedService

Workers and routers start as in a fleet, in a `ServiceHost` on uvloop. Benchmarks replace the model alone: a step sleeps
for `Role.step_s`, as on a GPU that leaves the cores to others. A token that such a step samples tells when: its id
counts units of 20 us on the clock that all processes of a machine share. The process ends with its standard input, or
with its service. vLLM's environment runs this program, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TextIO

import grpc.aio
import uvloop

from core.config import TandemConfig, from_mapping
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from core.model_info import ModelInfo
from core.service import Endpoint
from core.step import SampledToken, StepOutput, StepPlan
from engine import factory
from engine.fake_runner import FakeRunner
from fleet.host.by_name import pack
from fleet.host.service_host import Placement, ServiceHost, StartFault
from model_files.model_source import describe, resolve_model
from runtime.named_function import load_function
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.child_processes import ChildProcess, obey_on_loop, take_stdout

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
MAX_STREAMS = 1024
MODEL = TandemConfig().engine.model
UNITS_PER_S = 50_000
FIRST_ID, NUM_IDS = 1_000, 40_000  # ordinary tokens of the default model; the ids repeat after 0.8 s
Tables = dict[str, Any]  # of a config file
CONFIG: Tables = {
    "engine": {"block_size": BLOCK_SIZE},
    "scheduler": {"max_batched_tokens": 8192, "max_running": MAX_STREAMS, "max_waiting": MAX_STREAMS},
    "router": {"port": 0, "max_queued": 2 * MAX_STREAMS, "max_in_flight_per_worker": MAX_STREAMS},
    "transfer": {"transport": "memory"},
}
MOVING = CONFIG | {"transfer": {}}  # KV moves over nixl with digests; the pools have the layout of the default model


def config_with(base: Tables = CONFIG, **changes: Tables) -> Tables:
    return base | {table: base.get(table, {}) | options for table, options in changes.items()}


@dataclass(frozen=True, slots=True)
class Role:
    name: str  # "decode", "prefill", "router" or "bare"
    core: int | None = None  # of the whole process; None: every core
    ordinal: int = 0
    config: Tables = field(default_factory=lambda: CONFIG)
    host: str = ""  # the address of its machine as peers reach it
    cores: tuple[int, ...] = ()  # of its compute threads; empty = every core
    builder: str = ""  # module:function that builds the service from config and placement; empty = that of `tandem`
    # Of a worker: the time of one step; None = the model computes. Of a bare server: 0 = as fast as it can.
    step_s: float | None = 0.0
    token_s: float = 0.0  # of a worker that sleeps: what each prompt token adds to the time of a step
    num_blocks: int = 65_536  # of the pool of a worker that sleeps


# ---- the side of the benchmark, or of the test


class ServiceProcess(ChildProcess):
    def __init__(
        self,
        role: Role,
        prefix: Sequence[str | Path] = (),
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> None:
        """`prefix`: of the command, such as `ip netns exec ...`."""
        self.role = role
        self.draining = False
        command = [*prefix, python, "-m", "tests.support.service_process", json.dumps(asdict(role))]
        super().__init__(f"{role.name}-{role.ordinal}", command, environment, ROOT, role.core, log)

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        found = self.call("endpoint")
        return Endpoint(**found | {"role": ServiceRole(found["role"])})

    @property
    def address(self) -> str:
        return self.endpoint.address

    def follow(self, workers: Sequence[ServiceProcess | Endpoint]) -> None:
        """For a router: these are the workers of the fleet."""
        endpoints = [
            worker if isinstance(worker, Endpoint) else replace(worker.endpoint, draining=worker.draining)
            for worker in workers
        ]
        self.call("follow", workers=[asdict(endpoint) | {"role": endpoint.role.value} for endpoint in endpoints])


@contextlib.contextmanager
def running(*roles: Role) -> Iterator[list[ServiceProcess]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for role in roles:
            processes.append(ServiceProcess(role))
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


def token_id_at(now: float) -> int:
    return FIRST_ID + int(now * UNITS_PER_S) % NUM_IDS


def age_s(token_id: int, now: float) -> float:
    """Seconds since the token was sampled, if that was less than 0.8 s ago."""
    return ((token_id_at(now) - token_id) % NUM_IDS) / UNITS_PER_S


class SleepingRunner(FakeRunner):
    """`FakeRunner` without its model: only the pool is real."""

    def __init__(self, info: ModelInfo, num_blocks: int, layout: KVLayout, step_s: float, token_s: float = 0.0) -> None:
        super().__init__(info, layout, num_blocks)
        self._step_s, self._token_s = step_s, token_s
        self._submitted: deque[StepPlan] = deque()

    def submit(self, step: StepPlan) -> None:
        self._submitted.append(step)

    def collect(self) -> StepOutput:
        step = self._submitted.popleft()
        num_prompt_tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)
        time.sleep(self._step_s + num_prompt_tokens * self._token_s)
        token = SampledToken(token_id_at(time.monotonic()))
        return StepOutput(
            step.step_id, {chunk.sequence.sequence_id: (token,) for chunk in step.chunks if chunk.samples}
        )


class BareServer(inference_pb2_grpc.InferenceServicer):
    """The messages of a router without a router: what grpc.aio alone can send.

    With `step_s`, each call sends a message at the end of each step, and its token ids tell when that was.
    """

    def __init__(self, step_s: float, _: Placement) -> None:
        self._step_s = step_s
        self._step: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if step_s:
            self._stepping = asyncio.create_task(self._run_steps())

    async def start(self) -> Endpoint:
        self._server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return Endpoint("bare", f"127.0.0.1:{port}", ServiceRole.ROUTER)

    async def failed(self) -> BaseException:
        return await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        await self._server.stop(None)

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


def build_sleeping_runner(role: Role, config: TandemConfig, step_s: float) -> SleepingRunner:
    info = describe(resolve_model(config.engine.model), config.engine.max_context)
    num_layers, num_kv_heads, head_dim = (1, 1, 2) if config.transfer.transport == "memory" else (30, 3, 64)
    layout = KVLayout(info.fingerprint, "bfloat16", num_layers, num_kv_heads, config.engine.block_size, head_dim)
    return SleepingRunner(info, role.num_blocks, layout, step_s, role.token_s)


def factory_of(role: Role) -> Any:
    """Takes the placement, and returns the service."""
    config = from_mapping(role.config)
    if role.name == "bare":
        return functools.partial(BareServer, role.step_s or 0.0)
    if (step_s := role.step_s) is not None:
        factory.build_runner = lambda *_, **__: build_sleeping_runner(role, config, step_s)
    composition = "cli.vllm" if config.engine.name == "vllm" and role.name != "router" else "cli.compose"
    kind = "router" if role.name == "router" else f"{role.name}_worker"
    return functools.partial(load_function("builder", role.builder or f"{composition}:build_{kind}"), config)


class HostedService:
    """Each public method is a command."""

    def __init__(self, host: ServiceHost, endpoint: Endpoint) -> None:
        self._host, self._endpoint = host, endpoint

    @property
    def _service(self) -> Any:
        return self._host._service

    def endpoint(self) -> dict[str, Any]:
        return asdict(self._endpoint) | {"role": self._endpoint.role.value}

    async def follow(self, workers: list[dict[str, Any]]) -> None:
        await self._host.set_fleet([Endpoint(**one | {"role": ServiceRole(one["role"])}) for one in workers], [])

    async def drain(self, timeout_s: float) -> None:
        """As the supervisor drains a worker."""
        await self._service.drain(timeout_s)

    def step_times(self) -> dict[str, float]:
        """Of a worker: seconds in steps and between steps, since the start."""
        executor = self._service._parts.executor
        return {"step_s": executor.step_seconds, "idle_s": executor.idle_seconds}

    def counters(self) -> dict[str, float]:
        load = self._service._parts.machine.load()
        return {"read_bytes": load.transferred_bytes, "disk_writes": load.num_disk_writes}

    async def apply(self, function: str, **arguments: Any) -> Any:
        """Call module:function with the service, in its process."""
        found = load_function("function", function)(self._service, **arguments)
        return await found if asyncio.iscoroutine(found) else found


async def serve(role: Role, answers: TextIO) -> None:
    host = ServiceHost()
    placement = Placement(
        role.ordinal, role.host, address="", num_threads=1, control=None, cores=role.cores,
        slot=f"{role.name}-{role.ordinal}",
    )  # fmt: skip
    endpoint = await host.start(pack(factory_of(role)), placement)
    if isinstance(endpoint, StartFault):
        raise RuntimeError(endpoint.reason)
    commands = asyncio.create_task(obey_on_loop(HostedService(host, endpoint), answers))
    await asyncio.wait((commands, asyncio.create_task(host.wait())), return_when=asyncio.FIRST_COMPLETED)
    await host.stop()
    if commands.done():
        commands.result()  # raises what a command has raised
    else:
        os._exit(1)  # the service has failed, and a thread reads the standard input


if __name__ == "__main__":
    uvloop.run(serve(Role(**json.loads(sys.argv[1])), take_stdout()))
