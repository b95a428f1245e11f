"""Services that serve nothing but say what happens to them, for tests of everything that hosts them.

Actors in other processes import this module, so it stands beside the tests and holds no test. What a service says goes
to a Unix datagram socket of the test: the test waits for a message and never polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from core.config import ClusterConfig, LiveConfig
from core.errors import ModelNotFound
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from core.traffic import RequestTotals, RouterTraffic
from fleet.host.service_host import Placement
from fleet.law.events import FleetMessage
from fleet.supervisor.spec import FleetSpec

if TYPE_CHECKING:
    from fleet.ray.cluster import Cluster

PATIENCE_S = 90.0  # for a busy machine: real workers start in six seconds on a quiet one


class FakeService:
    """A router or a worker. Its port is taken for real, so that a restart on the same port means something."""

    def __init__(self, role: ServiceRole, journal: str, placement: Placement) -> None:
        self._role, self._journal, self._placement = role, journal, placement
        self._server: asyncio.Server | None = None
        self._broken = asyncio.Event()
        self.name = f"{role.value}-{placement.ordinal}"

    async def start(self) -> Endpoint:
        host, _, port = self._placement.address.rpartition(":")
        self._server = await asyncio.start_server(
            self._break, host or "127.0.0.1", int(port or 0), reuse_port=bool(port)
        )
        address = f"{host or '127.0.0.1'}:{self._server.sockets[0].getsockname()[1]}"
        control = self._placement.control
        self._report(
            "started",
            wanted=None if control is None else {role.value: size for role, size in (await control.scale({})).items()},
            address=address,
            host=self._placement.host,
            shared=self._placement.address,
            num_threads=self._placement.num_threads,
            cores=self._placement.cores,
            omp=os.environ["OMP_NUM_THREADS"],
            niceness=os.nice(0),
            gpus=self._placement.gpus,
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        return Endpoint(f"{self.name}-{os.getpid():x}", address, self._role)

    def _break(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        self._broken.set()

    def set_config(self, live: LiveConfig) -> None:
        self._report("config", max_queued=live.router.max_queued)

    async def set_workers(self, workers: list[Endpoint]) -> None:
        self._report("workers", workers=sorted(worker.service_id.rpartition("-")[0] for worker in workers))

    async def set_routers(self, routers: list[FleetRouter]) -> None:
        del routers

    def traffic(self, start_s: float) -> RouterTraffic:
        del start_s
        return RouterTraffic(RequestTotals(), 0, 0, 1.0, ())

    async def failed(self) -> BaseException:
        """Whoever connects to its port breaks it."""
        await self._broken.wait()
        return RuntimeError("somebody connected")

    async def drain(self, timeout_s: float) -> None:
        self._report("drained", timeout_s=timeout_s)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._report("stopped")

    def _report(self, event: str, **details: object) -> None:
        message = json.dumps({"name": self.name, "event": event, "pid": os.getpid(), **details})
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(message.encode(), self._journal)


def router_host(machine: str) -> str:
    return machine or "127.0.0.1"


def build_nothing(placement: Placement) -> FakeService:
    raise ModelNotFound(f"no model of that name for worker {placement.ordinal}")


def fake_fleet(journal: Path, config: ClusterConfig) -> FleetSpec:
    return FleetSpec(
        config,
        router=functools.partial(FakeService, ServiceRole.ROUTER, str(journal)),
        prefill=functools.partial(FakeService, ServiceRole.PREFILL, str(journal)),
        decode=functools.partial(FakeService, ServiceRole.DECODE, str(journal)),
        router_host=router_host,
        router_port=0,
        drain_timeout_s=7.0,
        router_drain_timeout_s=5.0,
    )


class Journal(asyncio.DatagramProtocol):
    """The test's end of the socket: messages in the order in which they came."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._closed = asyncio.Event()
        self.pids: set[int] = set()
        self.drained: set[object] = set()
        self.started: dict[str, dict[str, object]] = {}  # the newest start of each

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[Journal]:
        transport, journal = await asyncio.get_running_loop().create_datagram_endpoint(
            cls, local_addr=str(path), family=socket.AF_UNIX
        )
        try:
            yield journal
        finally:
            transport.close()
            await journal._closed.wait()

    def datagram_received(self, data: bytes, _addr: object) -> None:
        message = json.loads(data)
        self.pids.add(message["pid"])
        if message["event"] == "started":
            self.started[message["name"]] = message
        if message["event"] == "drained":
            self.drained.add(message["name"])
        self._messages.put_nowait(message)

    def connection_lost(self, _: Exception | None) -> None:
        self._closed.set()

    async def start_of(self, name: str) -> dict[str, object]:
        """The newest start of a service; waits for the first."""
        return self.started.get(name) or await self.wait_for(name=name, event="started")

    async def start_after(self, before: dict[str, object]) -> dict[str, object]:
        """The start that follows this one. It may have come already: two processes send in no order."""
        name = str(before["name"])
        while self.started[name]["pid"] == before["pid"]:
            await self.wait_for(name=name, event="started")
        return self.started[name]

    async def wait_for_drains(self, names: set[str]) -> None:
        """Until each of these services has drained: the fleet's own news may be read before the last message."""
        while not names <= self.drained:
            await self.wait_for(event="drained")

    async def wait_for(self, **wanted: object) -> dict[str, object]:
        """The next message with these fields; those before it are passed over."""
        seen: list[dict[str, object]] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    message = await self._messages.get()
                    seen.append(message)
                    if all(message.get(key) == value for key, value in wanted.items()):
                        return message
        except TimeoutError:
            raise AssertionError(f"no message with {wanted}; there were {seen}") from None


async def wait_for_update(cluster: Cluster, kind: type) -> object:
    """The next update of this kind."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for update in await cluster.updates():
                if isinstance(update, kind):
                    return update


async def wait_for_message(cluster: Cluster, text: str) -> None:
    """Until an update has told the operator this."""
    async with asyncio.timeout(PATIENCE_S):
        while not any(isinstance(update, FleetMessage) and text in update.text for update in await cluster.updates()):
            pass
