"""Threads for validation and tokenizing beside the router's loop, with a bounded queue and a deadline for each call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from core.errors import DeadlineExceeded, QueueFull

# Tokenizing releases the interpreter lock, so these threads compete with the loop for cores only (docs/adr/0029).
NUM_THREADS = 4

P = ParamSpec("P")
R = TypeVar("R")


class BoundedPool:
    """`max_pending` limits the calls that run or wait for a thread.

    Calls wait here, not in the queue of the executor: there, a call that ended early would keep its prompt until a
    thread is free.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._num_pending = 0
        self._free_threads = asyncio.Semaphore(NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="validation")

    async def run(self, timeout_s: float, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` in a thread and return its result.

        Raises the exception of `function`, `QueueFull` beyond `max_pending`, and `DeadlineExceeded` after `timeout_s`.
        A call that ends early leaves the queue; if `function` has started, it runs to its end.
        """
        if self._num_pending >= self._max_pending:
            raise QueueFull(f"{self._num_pending} requests wait for validation, and max_queued is {self._max_pending}")
        self._num_pending += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._free_threads.acquire()
                result = asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
                result.add_done_callback(lambda _: self._free_threads.release())
                # Without the shield, a call that ends early would free a thread that still works.
                return await asyncio.shield(result)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request was validated") from None
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
