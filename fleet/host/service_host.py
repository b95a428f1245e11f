"""Hosts one service in one process: sets the environment, imports the code of the service, then starts the service.

The factory arrives packed (fleet/host/by_name.py), and is opened after the thread count is set: a maths library reads
the count once, when it is imported. A failed start returns a `StartFault` with one line for the operator; the log of
the process has the traceback.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.config import LiveConfig
from core.errors import TandemError
from core.fleet_control import FleetControl
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter, RouterControl, Service, WorkerControl, join_address
from core.traffic import RouterTraffic
from fleet.host.by_name import software_version, unpack
from runtime.log_lines import log_to_stderr

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """The place where a service starts."""

    ordinal: int  # number of its slot
    host: str  # address of this machine as peers reach it; empty when the whole fleet runs on one machine
    address: str  # of a router: host:port that routers of this machine share; empty = alone on the configured port
    num_threads: int  # compute threads, unless the config gives a number
    control: FleetControl | None  # for a router: the supervisor, for its operators
    cores: tuple[int, ...] = ()  # for compute threads; empty = every core
    # Share of the only GPU that CUDA shows this process, in [0, 1], or their number; 0 = it shows none. None: placed
    # without Ray, on the device of the config.
    gpus: float | None = None
    slot: str = ""  # its name, such as decode-1; empty: that of the role and the ordinal


# When a step starts, the event loop still encodes the tokens of the previous step. At Python's default of 5 ms the
# thread of the step waits that long for the interpreter: with 32 streams, a twelfth of a step.
SWITCH_INTERVAL_S = 1e-4

EVERY_ADDRESS = ("0.0.0.0", "[::]")  # of a machine, which reaches such a server on 127.0.0.1, also without IPv6

# A module-level function, or a functools.partial of one, because it is pickled by name.
ServiceFactory = Callable[[Placement], Service]


@dataclass(frozen=True, slots=True)
class StartFault:
    reason: str  # one line
    permanent: bool  # the same start would fail every time


def reachable(endpoint: Endpoint, host: str) -> Endpoint:
    """A worker's endpoint as routers dial it; `host` as in `Placement`. Clients see a router's as configured."""
    listening, _, port = endpoint.address.rpartition(":")
    if endpoint.role is ServiceRole.ROUTER or listening not in EVERY_ADDRESS:
        return endpoint
    return replace(endpoint, address=join_address(host or "127.0.0.1", port))


class ServiceHost:
    """Runs on one asyncio loop. Call `start` once, before anything else."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._stopped = asyncio.Event()

    async def start(self, factory: bytes, placement: Placement) -> Endpoint | StartFault:
        log_to_stderr(logging.INFO)
        logger.info("%s starts", placement.slot)  # by this line an operator finds the log of a service
        os.environ["OMP_NUM_THREADS"] = str(placement.num_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.disable()  # imports create half a million lasting objects, and each collection would scan them all
        try:
            build: ServiceFactory = unpack(factory)
            self._service = build(placement)
            endpoint = replace(await self._service.start(), version=software_version())
            return reachable(endpoint, placement.host)
        except TandemError as error:
            traceback.print_exc(file=sys.stderr)
            return StartFault(str(error), permanent=not error.retryable)
        except Exception as error:  # noqa: BLE001 - a start may fail in any library, and the operator sees each failure
            traceback.print_exc(file=sys.stderr)
            return StartFault(f"{type(error).__name__}: {error}".splitlines()[0], permanent=True)
        finally:
            gc.freeze()  # later collections skip the objects of the imports
            gc.enable()

    async def drain(self, timeout_s: float) -> None:
        """Drain for at most `timeout_s`, then stop."""
        try:
            if self._service is not None:
                await self._service.drain(timeout_s)
        finally:
            await self.stop()

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        """As `Host.switch_role`."""
        worker: WorkerControl = self._service  # type: ignore[assignment]  # the supervisor calls this on workers only
        try:
            await worker.switch_role(role, timeout_s)
        except TandemError as error:
            return str(error)
        return ""

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.stop()
        self._stopped.set()

    async def set_config(self, live: LiveConfig) -> None:
        assert self._service is not None, "configured before start"
        self._service.set_config(live)

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None:
        router: RouterControl = self._service  # type: ignore[assignment]  # the supervisor calls this on routers only
        await router.set_workers(workers)
        await router.set_routers(routers)

    async def traffic(self, start_s: float) -> RouterTraffic:
        router: RouterControl = self._service  # type: ignore[assignment]  # the supervisor calls this on routers only
        return router.traffic(start_s)

    async def wait(self) -> str:
        """Return an empty text after `stop`, or the reason after a fault of the service.

        A call that waits here fails when the process dies: so the supervisor notices the death.
        """
        assert self._service is not None, "wait before start"
        stopped = asyncio.ensure_future(self._stopped.wait())
        failed = asyncio.ensure_future(self._service.failed())
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if not failed.done():
            failed.cancel()
            return ""
        stopped.cancel()
        error = failed.result()
        traceback.print_exception(error, file=sys.stderr)
        return f"{type(error).__name__}: {error}".splitlines()[0]
