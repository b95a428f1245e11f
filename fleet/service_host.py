"""Hosts one service in one process: environment first, then the code it needs, then the service.

The factory travels as a pickle and is opened only after the thread count is set, because a maths library reads it once,
when it is imported. Whatever goes wrong comes back as a `StartFault` with one line for the operator; the traceback
stays in this process's log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import TandemError
from core.service import Endpoint, RouterControl, Scale, Service


@dataclass(frozen=True, slots=True)
class Placement:
    """What a service learns of the place where it is started."""

    ordinal: int  # its number in its pool
    host: str  # this machine's address as its peers reach it; empty where the whole fleet is on one machine
    address: str  # host:port where the same service answered before it died; empty at its first start
    num_threads: int  # for computing, unless the config names a number
    scale: Scale | None  # how a router asks for other pool sizes
    cores: tuple[int, ...] = ()  # its share of the machine's, for its compute threads; empty = all of them


# While a step begins, the loop still encodes the tokens of the last one. With Python's own 5 ms the step's thread would
# wait that long for the interpreter, with 32 streams a twelfth of a step.
SWITCH_INTERVAL_S = 1e-4

# Of standard error, which Ray keeps in a file for each process.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# A module-level function or a functools.partial of one: it must pickle by name.
ServiceFactory = Callable[[Placement], Service]


@dataclass(frozen=True, slots=True)
class StartFault:
    reason: str  # one line
    permanent: bool  # the same start would fail again


class ServiceHost:
    """`start` once, then anything; one asyncio loop runs all of it."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._stopped = asyncio.Event()

    async def start(self, factory: bytes, placement: Placement) -> Endpoint | StartFault:
        logging.basicConfig(format=LOG_FORMAT, level=logging.INFO)
        os.environ["OMP_NUM_THREADS"] = str(placement.num_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.disable()  # imports make half a million objects that stay, and each collection looks at them all
        try:
            build: ServiceFactory = pickle.loads(factory)
            self._service = build(placement)
            return await self._service.start()
        except TandemError as error:
            traceback.print_exc(file=sys.stderr)
            return StartFault(str(error), permanent=not error.retryable)
        except Exception as error:  # noqa: BLE001 - a start may fail in any library; the operator is told of each
            traceback.print_exc(file=sys.stderr)
            return StartFault(f"{type(error).__name__}: {error}".splitlines()[0], permanent=True)
        finally:
            gc.freeze()  # what is here now is never looked at again, also while it serves
            gc.enable()

    async def drain(self, timeout_s: float) -> None:
        """Drain, at most for `timeout_s`, and stop."""
        try:
            if self._service is not None:
                await self._service.drain(timeout_s)
        finally:
            await self.stop()

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.stop()
        self._stopped.set()

    async def set_workers(self, workers: list[Endpoint]) -> None:
        router: RouterControl = self._service  # type: ignore[assignment]  # only a router is ever asked
        await router.set_workers(workers)

    async def wait(self) -> str:
        """Until it is stopped (then empty) or fails by a fault of its own (then the reason).

        A call that waits here fails when the process dies: that is how its death is noticed.
        """
        assert self._service is not None, "start it first"
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
