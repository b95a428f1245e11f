"""The contracts of a service (router, prefill worker, decode worker) with its host and with callers in its process.

The host builds, starts, drains and stops the service, in this order, on one asyncio loop. In a cluster the host is a
Ray actor (fleet/ray/hosts.py); in tests and on a machine without Ray it is a plain process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from core.config import LiveConfig
from core.lifecycle import ServiceRole
from core.traffic import RouterTraffic

Metadata = Sequence[tuple[str, str]]  # of a gRPC call: the key of the client, its trace
C = TypeVar("C", contravariant=True)
F = TypeVar("F", contravariant=True)


def join_address(host: str, port: int | str) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The name and the address of a started service."""

    service_id: str  # unique among all starts: <slot>.<incarnation in hex>, where a slot is e.g. decode-1
    address: str  # host:port of its gRPC server
    role: ServiceRole
    version: str = ""  # of the software in its process; its host knows it
    draining: bool = False  # it will drain: routers send it no new call

    def has_switched(self, now: Endpoint) -> bool:
        """Whether the worker has left its role by the time of `now`. A worker that drained serves again only after a
        switch, and a slow router may miss one of two switches."""
        return self.role is not now.role or (self.draining and not now.draining)


@dataclass(frozen=True, slots=True)
class FleetRouter:
    """A router of the fleet, as the supervisor publishes it to every router."""

    router_id: str
    address: str  # host:port
    draining: bool


class Service(Protocol):
    async def start(self) -> Endpoint:
        """Start serving. Raises `TandemError` on failure."""

    async def failed(self) -> BaseException:
        """Wait until the service fails, and return the fault. The host then ends the service."""

    def set_config(self, live: LiveConfig) -> None:
        """Take the live options of the tables of this service. Work that is under way goes on. Call `start` first."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work and finish the present work, for at most `timeout_s`."""

    async def stop(self) -> None:
        """End at once: calls in flight fail with UNAVAILABLE. A second call does nothing."""


class Sink(Protocol[C, F]):
    """Takes the parts of one answer as they come, each a `C`, or an `F` at the end of a choice. No method waits."""

    @property
    def is_full(self) -> bool:
        """The reader is behind: the sink takes no part until it has called the callback of `when_room`."""

    def when_room(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once, as soon as the sink is no longer full."""

    def chunk(self, chunk: C, /) -> None: ...

    def finished(self, finished: F, /) -> None: ...


class HttpFront(Protocol):
    """The HTTP server in the process of a router."""

    async def start(self) -> None:
        """Accept connections. Raises `ConfigError`."""

    async def failed(self) -> BaseException:
        """Wait until the server ends without being asked to, and return the fault."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new connection, let open answers end for at most `timeout_s`, and cut the others off."""

    async def stop(self) -> None:
        """Cut off every answer. A second call does nothing."""


class WorkerControl(Service, Protocol):
    """A worker as the supervisor sees it."""

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> None:
        """Drain for at most `timeout_s`, then serve in the other role under the same name, with everything cached.

        Raises `TandemError` if work is left. The worker then refuses calls, and its host ends it.
        """


class RouterControl(Service, Protocol):
    """A router as the supervisor sees it."""

    async def set_workers(self, workers: list[Endpoint]) -> None:
        """`workers` lists every live worker. Connect to new ones; treat missing ones as lost, and those with another
        role than before as lost and new; send no new call to those that drain."""

    async def set_routers(self, routers: list[FleetRouter]) -> None:
        """`routers` lists every live router of the fleet, this one too."""

    def traffic(self, start_s: float) -> RouterTraffic:
        """Return the counts of this router and the loads of its workers, for the planner. Call `start` first.

        `start_s` is the time that a worker takes to start, if the planner starts one when a request waits. The request
        then waits one and a half times as long. 0 = the planner starts none.
        """


# The name of each role's size in the API and in errors.
SIZE_FIELDS = {ServiceRole.PREFILL: "prefill", ServiceRole.DECODE: "decode", ServiceRole.ROUTER: "routers"}

# The wanted number of services of a role.
PoolSizes = Mapping[ServiceRole, int]
