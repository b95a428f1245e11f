"""A whole deployment in one process, for tests: real gRPC, real agents, real machines, no Ray.

async with deploy(config, num_prefill=1, num_decode=1) as deployment:
    answer = await deployment.generate(text="Hello", max_tokens=8)
    await deployment.settle()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from cli.compose import build_decode_worker, build_prefill_worker, build_router
from core.config import EngineConfig, RouterConfig, SchedulerConfig, TandemConfig, TelemetryConfig, TransferConfig
from core.lifecycle import ServiceRole
from core.paths import PathState
from core.scheduling.block_pool import Column
from core.service import Endpoint
from decode_worker.machine import DecodeMachine
from fleet.host.service_host import Placement
from kv_transfer.protocol.machine import TransferMachine
from prefill_worker.machine import PrefillMachine
from router.service import RouterService
from runtime.rpc.grpc_server import open_channel
from runtime.rpc.security import load_credentials
from tandem_client.stubs import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.support.waiting import until
from worker.service import WorkerService

SETTLE_TIMEOUT_S = 30.0
SLACK_S = 3.0  # for a busy machine: timers, threads and reports between the end of a lease and the ledger
BUSY = (Column.HELD, Column.LEASED, Column.INCOMING)
CALL_TIMEOUT_S = 60.0


def tiny_config(
    model: str = "fake:tiny",
    transport: str = "memory",
    telemetry: TelemetryConfig | None = None,
    **router: object,
) -> TandemConfig:
    """A config that starts quickly. Every prompt goes through both pools, unless `router` changes that."""
    return TandemConfig(
        engine=EngineConfig(model=model, dtype="float32", kv_memory_mb=32, num_threads=1),
        scheduler=SchedulerConfig(max_batched_tokens=64, max_running=32),
        transfer=TransferConfig(transport=transport),
        router=RouterConfig(**({"port": 0, "local_prefill": "never"} | router)),  # type: ignore[arg-type]
        telemetry=telemetry or TelemetryConfig(),
    )


@dataclass
class Answer:
    """Everything that a stream delivered for one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    indices: list[int] = field(default_factory=list)
    chunks: list[inference_pb2.TokenChunk] = field(default_factory=list)
    started: inference_pb2.Started | None = None  # of the call; at its first choice
    end: inference_pb2.Finished | None = None

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """The next message of this choice."""
        if response.HasField("finished"):
            assert self.end is None, "two final messages"
            self.end = response.finished
        elif response.HasField("started"):
            self.started = response.started
        elif response.HasField("tokens"):
            tokens = response.tokens
            self.chunks.append(tokens)
            self.indices += range(tokens.index, tokens.index + len(tokens.token_ids))
            self.token_ids += tokens.token_ids
            self.text += tokens.text

    @property
    def finished(self) -> inference_pb2.Finished:
        assert self.end is not None, "the stream has no end"
        return self.end


@dataclass
class Deployment:
    config: TandemConfig
    router: RouterService
    prefill: list[WorkerService]
    decode: list[WorkerService]
    endpoints: dict[int, Endpoint]  # by id() of the worker service
    channel: grpc.aio.Channel
    router_address: str

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def cluster(self) -> cluster_pb2_grpc.ClusterStub:
        return cluster_pb2_grpc.ClusterStub(self.channel)

    @property
    def workers(self) -> list[WorkerService]:
        return self.prefill + self.decode

    def id_of(self, worker: WorkerService) -> str:
        return self.endpoints[id(worker)].service_id

    async def generate(self, timeout_s: float = CALL_TIMEOUT_S, **request: Any) -> Answer:
        """Generate one choice to its end."""
        return (await self.generate_all(make_request(**request), timeout_s))[0]

    async def generate_all(
        self, request: inference_pb2.GenerateRequest, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[Answer]:
        """Generate every choice to its end."""
        answers = [Answer() for _ in range(request.n or 1)]
        async for response in self.inference.Generate(request, timeout=timeout_s):
            event = response.finished if response.HasField("finished") else response.tokens
            answers[event.choice].take(response)
        return answers

    @property
    def caches_are_known(self) -> bool:
        """The router knows exactly the blocks that its workers have cached."""
        index = self.router._shell.view._workers.index
        return all(
            set(machine_of(worker).core.pool.registered_hashes()) == index.held(self.id_of(worker))
            for worker in self.workers
        )

    def ledgers(self) -> list[dict[Column, int]]:
        return [machine_of(worker).core.pool.ledger() for worker in self.workers]

    def drop_caches(self, workers: Iterable[WorkerService]) -> None:
        """Evict every cached block of idle workers, by allocating the whole pool and giving it back."""
        for worker in workers:
            pool = machine_of(worker).core.pool
            blocks = pool.allocate(pool.num_blocks)
            assert blocks is not None, "the worker is not idle"
            pool.release(blocks)

    async def switch_role(self, worker: WorkerService, role: ServiceRole, timeout_s: float = 20.0) -> None:
        """As the supervisor does it: the routers learn of the drain before, and of the role afterwards."""
        endpoint = self.endpoints[id(worker)]
        self.endpoints[id(worker)] = replace(endpoint, draining=True)
        await self.router.set_workers(list(self.endpoints.values()))
        await worker.switch_role(role, timeout_s)
        self.endpoints[id(worker)] = replace(endpoint, role=role)
        await self.router.set_workers(list(self.endpoints.values()))
        pools = {ServiceRole.PREFILL: self.prefill, ServiceRole.DECODE: self.decode}
        pools[endpoint.role].remove(worker)
        pools[role].append(worker)

    async def stop_workers(self) -> None:
        for worker in self.workers:
            await worker.stop()

    async def settle(self) -> None:
        """Wait at most a lease until no block is in use, until no request is open, and until the workers have reported
        that. Check the machines."""
        shell, view = self.router._shell, self.router._shell.view
        # First: a request that waits for a worker, or is on its way to one, would take blocks again.
        await until(lambda: shell.num_open == 0 and view.num_in_flight == 0, "the router still has requests")
        await until(lambda: not any(record.load.num_calls for record in view.workers()), "a load still has open calls")
        within_s = self.config.transfer.lease_s + SLACK_S

        def left() -> dict[str, object]:
            return {
                transfers(worker).address.name: (busy_blocks(worker), transfers(worker).claims())
                for worker in self.workers
                if busy_blocks(worker) or transfers(worker).alive
            }

        await until(lambda: not left(), lambda: f"blocks are still in use: {left()}", within_s)
        for worker in self.workers:
            machine_of(worker).check()
        shell._driver.machine.check()


def machine_of(worker: WorkerService) -> PrefillMachine | DecodeMachine:
    machine = worker._parts.machine
    assert isinstance(machine, PrefillMachine | DecodeMachine)
    return machine


def transfers(worker: WorkerService) -> TransferMachine:
    return machine_of(worker).transfers


def busy_blocks(worker: WorkerService) -> dict[str, int]:
    """Number of blocks in use, by column."""
    ledger = machine_of(worker).core.pool.ledger()
    return {column.value: ledger[column] for column in BUSY if ledger[column]}


def make_request(
    text: str | None = None,
    token_ids: Iterable[int] | None = None,
    max_tokens: int = 8,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    **fields: object,
) -> inference_pb2.GenerateRequest:
    """A greedy request that runs to max_tokens, unless the arguments say otherwise."""
    stop = {name: fields.pop(name) for name in ("stop_strings", "stop_token_ids", "min_tokens") if name in fields}
    names = ("n", "logprobs", "cache_salt", "priority", "model", "user", "request_id", "output_format", "speculation")
    own = {name: fields.pop(name) for name in names if name in fields}
    request = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(temperature=temperature, **fields),  # type: ignore[arg-type]
        stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos, **stop),  # type: ignore[arg-type]
        **own,  # type: ignore[arg-type]
    )
    if text is not None:
        request.text = text
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    return request


@contextlib.asynccontextmanager
async def running_router(
    config: TandemConfig, workers: Sequence[Endpoint] = (), ordinal: int = 0
) -> AsyncIterator[tuple[RouterService, str]]:
    """A router in this process, as soon as each of the workers has reported to it, and its address."""
    router = build_router(config, place(ordinal))
    try:
        endpoint = await router.start()
        await router.set_workers(workers)
        await wait_until_known(router, len(workers))
        yield router, endpoint.address
    finally:
        await router.stop()


@contextlib.asynccontextmanager
async def deploy(config: TandemConfig, num_prefill: int = 1, num_decode: int = 1) -> AsyncIterator[Deployment]:
    prefill = [build_prefill_worker(config, place(ordinal)) for ordinal in range(num_prefill)]
    decode = [build_decode_worker(config, place(ordinal)) for ordinal in range(num_decode)]
    async with contextlib.AsyncExitStack() as stack:
        for service in (*prefill, *decode):
            stack.push_async_callback(service.stop)
        started = await asyncio.gather(*(service.start() for service in (*prefill, *decode)))
        router, address = await stack.enter_async_context(running_router(config, started))
        credentials = load_credentials(config.security)
        channel = await stack.enter_async_context(open_channel(address, 4 << 20, credentials))
        endpoints = {id(worker): found for worker, found in zip((*prefill, *decode), started, strict=True)}
        deployment = Deployment(config, router, prefill, decode, endpoints, channel, address)
        await wait_until_met(deployment)
        stack.push_async_callback(deployment.stop_workers)  # those that have come later, too
        yield deployment


@contextlib.asynccontextmanager
async def another_router(deployment: Deployment) -> AsyncIterator[Deployment]:
    """A second router for the same workers, as soon as each worker has reported to it."""
    async with running_router(deployment.config, list(deployment.endpoints.values()), 1) as (router, address):
        async with open_channel(address, 4 << 20) as channel:
            yield replace(deployment, router=router, channel=channel, router_address=address)


async def wait_until_known(router: RouterService, num_workers: int) -> None:
    """Wait until `num_workers` workers have reported to the router."""
    view, known = router._shell.view, f"the router knows {num_workers} workers"
    await until(lambda: len(list(view.workers())) == num_workers, known, SETTLE_TIMEOUT_S)


async def wait_until_met(deployment: Deployment) -> None:
    """Wait until the path of each pair of workers is measured, so that no measurement runs during the test."""

    def version(worker: WorkerService) -> int:
        return machine_of(worker).transfers.address.protocol_version

    def met(worker: WorkerService) -> bool:
        measured = [path for path in machine_of(worker).transfers.paths if path.state is not PathState.CONNECTING]
        return len(measured) == sum(version(prefill) == version(worker) for prefill in deployment.prefill)

    await until(lambda: all(map(met, deployment.decode)), "the paths of all pairs are measured", SETTLE_TIMEOUT_S)


def place(ordinal: int) -> Placement:
    return Placement(ordinal=ordinal, host="", address="", num_threads=1, control=None)


def trailers_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    pairs: Any = error.trailing_metadata()  # the type stubs do not describe pairs
    return {str(key): str(value) for key, value in pairs}
