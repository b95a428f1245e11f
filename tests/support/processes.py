"""A fleet of real processes without Ray, for faults of the operating system: kill -9, SIGSTOP, a dead link.

async with Fleet.start(config, {"prefill": 2, "decode": 2}) as fleet:
    stream = Stream(fleet.inference, prompt)  # tests/support/faults.py
    await fleet.kill("decode-0")
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio
import psutil

from core.config import TandemConfig
from core.service import Endpoint
from tandem_client.stubs import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.deployment import SLACK_S
from tests.support.service_process import Role, ServiceProcess
from tests.support.waiting import until

START_TIMEOUT_S = 120.0  # as PATIENCE_S of commands: the time of a start is not under test
SLOW_DOWN = "tests.support.steps:slow_down"


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a service, and its command."""

    host: str = "127.0.0.1"  # where it listens
    prefix: tuple[str, ...] = ()  # of its command, e.g. ip netns exec ...
    environment: Mapping[str, str] = field(default_factory=dict)


async def _as_it_is(address: str) -> str:
    return address


class FleetProcess(ServiceProcess):
    """`channel`: to its gRPC server, once it is connected. `load`: the newest of a worker."""

    def __init__(self, role: Role, site: Site, watched: bool = True) -> None:
        super().__init__(role, site.prefix, environment=site.environment, log=sys.__stderr__)
        self._is_watched = watched and role.name != "router"
        self.load = worker_pb2.LoadReport()
        self.channel: grpc.aio.Channel | None = None
        self._watching: asyncio.Task[None] | None = None

    async def connect(self, address: str) -> None:
        # gRPC waits long between attempts by default; a test must reach a stopped process soon after it runs again.
        options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        if self._is_watched:
            self._watching = asyncio.create_task(self._watch(self.channel))

    @property
    def busy_blocks(self) -> int:
        ledger = self.load.ledger
        return int(ledger.held + ledger.leased + ledger.incoming)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Read the reports of the worker until its process ends."""
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for report in stub.Watch(worker_pb2.WatchRequest(router_id="a test")):
                if report.HasField("load"):  # else the load has not changed
                    self.load = report.load

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.channel is not None:
            await self.channel.close(None)
        await asyncio.to_thread(self.kill)  # meanwhile the loop sees its connections end
        await asyncio.to_thread(self.stop)


@dataclass(eq=False)
class Fleet:
    config: TandemConfig
    sizes: Mapping[str, int]
    step_delays_s: Mapping[str, float] = field(default_factory=dict)  # by role
    sleeps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of roles whose model sleeps
    watched: bool = True  # the loads of the workers
    site_of: Callable[[str], Site] = lambda _name: Site()
    reach: Callable[[str], Awaitable[str]] = _as_it_is  # a service's address -> where the test finds it
    others: Sequence[Endpoint] = ()  # workers in no process of the fleet; the router gets them too
    operator_key: str = ""  # of a fleet with API keys
    services: dict[str, FleetProcess] = field(default_factory=dict)  # by name: router-0, decode-1, ...

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, *arguments: object, **options: object) -> AsyncIterator[Fleet]:
        fleet = cls(*arguments, **options)  # type: ignore[arg-type]
        try:
            sizes = {"router": 1, **fleet.sizes}
            names = [f"{role}-{ordinal}" for role, size in sizes.items() for ordinal in range(size)]
            await asyncio.gather(*(fleet.spawn(name) for name in names))
            await fleet.publish()
            yield fleet
        finally:
            await asyncio.gather(*(service.close() for service in fleet.services.values()))

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.services["router-0"].channel)  # type: ignore[no-untyped-call]

    @property
    def cluster(self) -> cluster_pb2_grpc.ClusterStub:
        return cluster_pb2_grpc.ClusterStub(self.services["router-0"].channel)  # type: ignore[no-untyped-call]

    def pool(self, role: str) -> list[FleetProcess]:
        return [service for name, service in self.services.items() if name.startswith(role)]

    # ---- starting and stopping processes

    async def spawn(self, name: str) -> None:
        role, _, ordinal = name.partition("-")
        site = self.site_of(name)
        options = {"step_s": None, **self.sleeps.get(role, {})}
        started = Role(role, ordinal=int(ordinal), config=asdict(self.config), host=site.host, **options)
        self.services[name] = service = FleetProcess(started, site, self.watched)
        async with asyncio.timeout(START_TIMEOUT_S):
            endpoint = await asyncio.to_thread(lambda: service.endpoint)
            if delay_s := self.step_delays_s.get(role):
                await asyncio.to_thread(service.call, "apply", function=SLOW_DOWN, step_s=delay_s)
        await service.connect(await self.reach(endpoint.address))

    async def publish(self) -> None:
        """Send the list of workers to the routers, as a supervisor does, and wait until each worker has reported."""
        num_workers = await self._follow()
        async with asyncio.timeout(START_TIMEOUT_S):
            for router in self.pool("router"):
                while await self._num_serving(router) != num_workers:
                    await asyncio.sleep(0.02)

    async def _follow(self) -> int:
        routers = self.pool("router")
        alive = [each for each in self.services.values() if each not in routers and each.alive]
        workers: list[ServiceProcess | Endpoint] = [*alive, *self.others]
        async with asyncio.timeout(START_TIMEOUT_S):
            for router in routers:
                await asyncio.to_thread(router.follow, workers)
        return len(workers)

    async def drain(self, name: str) -> None:
        """As the supervisor drains a worker. Returns when the worker has nothing left."""
        self.services[name].draining = True
        await self._follow()
        await asyncio.to_thread(self.services[name].call, "drain", timeout_s=START_TIMEOUT_S)

    async def _num_serving(self, router: FleetProcess) -> int:
        cluster = cluster_pb2_grpc.ClusterStub(router.channel)  # type: ignore[no-untyped-call]
        metadata = [("authorization", f"Bearer {self.operator_key}")] if self.operator_key else []
        fleet = await cluster.GetFleet(cluster_pb2.GetFleetRequest(), metadata=metadata)
        return sum(worker.state == worker_pb2.WORKER_STATE_SERVING for worker in fleet.workers)

    async def kill(self, name: str) -> None:
        """kill -9. No message tells the router; it must detect the death."""
        assert self.services[name].kill() == -signal.SIGKILL, "the process ended before the kill"

    @contextlib.asynccontextmanager
    async def stopped(self, name: str) -> AsyncIterator[None]:
        """SIGSTOP at the start of this context, SIGCONT at its end."""
        process = psutil.Process(self.services[name].pid)
        process.suspend()
        try:
            await until(lambda: process.status() == psutil.STATUS_STOPPED, f"{name} is stopped")
            yield
            assert process.status() == psutil.STATUS_STOPPED, f"{name} did not stay stopped"
        finally:
            process.resume()

    async def heal(self) -> None:
        """Restart every dead service under its name, and send the list of workers to the router."""
        dead = [service for service in self.services.values() if not service.alive]
        for service in dead:
            await service.close()
            await self.spawn(service.name)
        await self.publish()

    # ---- ledgers

    async def settle(self, within_s: float | None = None) -> None:
        """Wait until every live worker reports no held, leased or incoming block and no live transfer. By default, at
        most for a lease."""

        def left() -> dict[str, str]:
            return {
                service.name: str(service.load.ledger)
                for service in [*self.pool("prefill"), *self.pool("decode")]
                if service.alive and (service.busy_blocks or service.load.num_transfers)
            }

        within_s = self.config.transfer.lease_s + SLACK_S if within_s is None else within_s
        await until(lambda: not left(), lambda: f"blocks are still in use: {left()}", within_s)

    # ---- for a test that fails

    async def failures_of(self, request_id: str) -> str:
        """The errors that ended attempts of a request, from its trace."""
        trace = await self.cluster.GetTrace(cluster_pb2.GetTraceRequest(id=request_id))
        return "; ".join(f"{s.start_ms:.0f} ms {s.name} on {s.process}: {s.error}" for s in trace.spans if s.error)
