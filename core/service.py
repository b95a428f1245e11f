"""The contract between a service (router, prefill worker, decode worker) and its host.

The host builds, starts, drains and stops the service, in this order, on one asyncio loop. In a cluster the host is a
Ray actor (fleet/ray_hosts.py); in tests and on a machine without Ray it is a plain process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from core.lifecycle import ServiceRole


def join_address(host: str, port: int | str) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The name and the address of a started service."""

    service_id: str  # unique among all starts: <role>-<n>.<incarnation in hex>, of a router router-<random hex>
    address: str  # host:port of its gRPC server
    role: ServiceRole


class Service(Protocol):
    async def start(self) -> Endpoint:
        """Start serving. Raises `TandemError` on failure."""

    async def failed(self) -> BaseException:
        """Wait until the service fails, and return the fault. The host then ends the service."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work and finish the present work, for at most `timeout_s`."""

    async def stop(self) -> None:
        """End at once: calls in flight fail with UNAVAILABLE. A second call does nothing."""


class RouterControl(Service, Protocol):
    """The router as the supervisor sees it."""

    async def set_workers(self, workers: list[Endpoint]) -> None:
        """`workers` lists every live worker. Connect to new ones; treat missing ones as lost."""


# Takes the wanted (prefill, decode) pool sizes, None = unchanged; returns the sizes now wanted.
Scale = Callable[[int | None, int | None], Awaitable[tuple[int, int]]]
