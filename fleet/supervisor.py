"""Keeps a fleet alive: the shell of fleet/machine.py.

It creates one host per member, waits in it, and reports to the machine what becomes of it. What a host is, is not known
here: fleet/cluster.py makes Ray actors of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import Endpoint
from fleet.cores import Seats
from fleet.events import (
    Drained,
    DrainService,
    FleetAction,
    FleetEvent,
    FleetFailed,
    FleetReady,
    FleetStopped,
    KillService,
    Member,
    Notice,
    PublishFleet,
    ScaleTo,
    ServiceDied,
    ServiceStarted,
    Serving,
    Shutdown,
    StartFailed,
    StartService,
)
from fleet.machine import FleetMachine
from fleet.service_host import ServiceFactory, StartFault
from runtime.driver import Driver

MAX_NEWS = 1000  # the oldest is dropped where nobody reads them

News = Notice | FleetReady | FleetFailed | FleetStopped


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What a supervisor keeps alive."""

    config: ClusterConfig
    router: ServiceFactory
    prefill: ServiceFactory
    decode: ServiceFactory
    drain_timeout_s: float  # of a worker
    router_drain_timeout_s: float

    def factory(self, role: ServiceRole) -> ServiceFactory:
        factories = {
            ServiceRole.ROUTER: self.router,
            ServiceRole.PREFILL: self.prefill,
            ServiceRole.DECODE: self.decode,
        }
        return factories[role]

    def resources(self, role: ServiceRole) -> dict[str, float]:
        """What one member takes of its machine."""
        needs = {ServiceRole.PREFILL: self.config.prefill_resource, ServiceRole.DECODE: self.config.decode_resource}
        return {needs[role]: 1.0} if role in needs else {}


class HostDied(Exception):
    """The process of a host has ended, or was ended because a call into it failed. Every other call raises this too."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A service's place among those that may share its machine."""

    number: int  # among the workers there; 0 for a router, which shares no cores
    num_workers: int  # wanted in the whole fleet


class Host(Protocol):
    """One process that hosts one service. Every method but `kill` raises `HostDied`."""

    async def machine(self) -> str:
        """Names the machine where it was placed; waits until it was."""

    async def start(self, address: str, seat: Seat) -> Endpoint | StartFault:
        """`address` as in `StartService`."""

    async def wait(self) -> None:
        """For as long as it lives."""

    async def drain(self, timeout_s: float) -> None: ...

    async def set_workers(self, workers: list[Endpoint]) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An `InvalidRequest` as a value: an exception would not survive its way between processes."""

    field: str
    message: str


class Supervisor:
    """Everything runs on one asyncio loop. `start` once, then anything."""

    def __init__(self, spec: FleetSpec, create_host: Callable[[Member], Host]) -> None:
        self._create_host = create_host
        self._machine = FleetMachine(spec.config, spec.drain_timeout_s, spec.router_drain_timeout_s)
        self._driver: Driver[FleetEvent, FleetAction] | None = None
        self._hosts: dict[Member, Host] = {}
        self._unpublished: dict[Member, tuple[Serving, ...]] = {}  # per router, the newest list it may not have seen
        self._news: deque[News] = deque(maxlen=MAX_NEWS)
        self._has_news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._router: Endpoint | None = None
        self._seats = Seats()

    async def start(self) -> None:
        self._driver = Driver(self._machine, self._perform, self._machine_failed)
        self._post(Tick())

    async def shutdown(self) -> None:
        """Drain everything; `FleetStopped` is the last of the news."""
        self._post(Shutdown())

    async def scale(self, prefill: int | None, decode: int | None) -> tuple[int, int] | Refusal:
        """(prefill, decode) wanted from now on."""
        try:
            self._post(ScaleTo(prefill, decode))
        except InvalidRequest as refused:
            return Refusal(refused.field, refused.message)
        return self._machine.wanted

    async def router(self) -> Endpoint | None:
        """Where the router answers; None before its first start."""
        return self._router

    async def news(self) -> list[News]:
        """What has happened since the last call; waits for the first item."""
        await self._has_news.wait()
        self._has_news.clear()
        news = list(self._news)
        self._news.clear()
        return news

    def _post(self, event: FleetEvent) -> None:
        assert self._driver is not None, "start it first"
        self._driver.post(event)

    def _machine_failed(self, error: BaseException) -> None:
        self._tell(FleetFailed(f"the supervisor has a bug: {error!r}"))

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self._has_news.set()

    def _perform(self, action: FleetAction) -> None:
        match action:
            case StartService():
                self._spawn(self._live(action.member, action.address))
            case DrainService():
                self._spawn(self._drain(action.member, action.timeout_s))
            case KillService():
                self._kill(action.member)
            case PublishFleet():
                idle = action.router not in self._unpublished
                self._unpublished[action.router] = action.workers
                if idle:
                    self._spawn(self._publish(action.router))
            case _:
                self._tell(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, member: Member, address: str) -> None:
        """One member from its start to its death."""
        host = self._hosts[member] = self._create_host(member)
        try:
            number = 0 if member.role is ServiceRole.ROUTER else self._seats.take(await host.machine(), member)
            result = await host.start(address, Seat(number, sum(self._machine.wanted)))
            if isinstance(result, StartFault):
                self._kill(member)
                self._post(StartFailed(member, result.reason, result.permanent))
                return
            if member.role is ServiceRole.ROUTER:
                self._router = result
            self._post(ServiceStarted(member, result.service_id, result.address))
            await host.wait()
        except HostDied as death:
            self._hosts.pop(member, None)
            self._post(ServiceDied(member, str(death)))
        finally:
            self._seats.leave(member)

    async def _drain(self, member: Member, timeout_s: float) -> None:
        with contextlib.suppress(HostDied):  # `_live` reports the death
            await self._hosts[member].drain(timeout_s)
            self._kill(member)
            self._post(Drained(member))

    def _kill(self, member: Member) -> None:
        host = self._hosts.pop(member, None)
        if host is not None:
            host.kill()

    async def _publish(self, router: Member) -> None:
        """One call at a time and the newest list last, so that a router never goes back to an older one."""
        try:
            while True:
                workers = self._unpublished[router]
                endpoints = [Endpoint(serving.service_id, serving.address, serving.member.role) for serving in workers]
                await self._hosts[router].set_workers(endpoints)
                if self._unpublished[router] is workers:
                    return
        except (HostDied, KeyError):
            return  # this router is gone; the next one is told everything when it starts
        finally:
            self._unpublished.pop(router, None)
