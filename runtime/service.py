"""What a router, a prefill worker and a decode worker have in common for whoever hosts them.

A service is built, started, drained and stopped, in this order, on one asyncio loop. A Ray actor hosts it in a cluster
(runtime/cluster.py); a test or a bare GPU machine hosts it in a plain process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from core.lifecycle import WorkerRole


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a started service answers."""

    service_id: str  # unique among all starts: <role>-<n>.<incarnation in hex>, of a router router-<random hex>
    address: str  # host:port of its gRPC server
    role: WorkerRole | None  # None = router


class Service(Protocol):
    async def start(self) -> Endpoint:
        """Be ready to serve. Raises `TandemError` where that cannot be."""

    async def failed(self) -> BaseException:
        """Waits until the service can no longer work by a fault of its own, and returns that; its host ends it."""

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what is here, at most for `timeout_s`."""

    async def stop(self) -> None:
        """End at once: calls in flight fail with UNAVAILABLE. May be called more than once."""


class RouterControl(Service, Protocol):
    """A router, as its supervisor sees it."""

    async def set_workers(self, workers: list[Endpoint]) -> None:
        """The workers that are alive now. Those missing from the list are lost; new ones are joined."""


# (prefill, decode) sizes wanted, None = leave as it is; answers the sizes wanted from now on.
Scale = Callable[[int | None, int | None], Awaitable[tuple[int, int]]]
