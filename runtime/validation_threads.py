"""Threads for validation and tokenizing beside the router's loop, with a bounded queue and a deadline for each call.

Tokenizing releases the interpreter lock, but a thread that holds the lock for a moment and has lost its core to another
thread holds up the loop. So there are few threads: one for short calls, which never wait for a long one, and one for
long calls on every `CORES_PER_LONG_CALL` cores.

A call of at most `MAX_INLINE_BYTES` takes about half a millisecond, and runs on the loop. A thread would cost more: the
loop and the thread take the lock from each other in turns (HTTP with 256 streams of 200 tokens: 46,000 tokens/s with a
thread for each call, 90,000 without).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from core.errors import DeadlineExceeded, QueueFull
from runtime.fair_slots import FairSlots
from runtime.owner_ledger import Owner, OwnerLedger

MAX_INLINE_BYTES = 1024  # about 250 tokens
MAX_SHORT_BYTES = 16 * 1024  # about 4,000 tokens, 10 ms
CORES_PER_LONG_CALL = 4
MAX_LONG_CALLS = 4

P = ParamSpec("P")
R = TypeVar("R")


class ValidationThreads:
    """`max_pending` limits the calls that run or wait for a thread, of the short and of the long ones each. They share
    the limit by the rule of `OwnerLedger.has_room`.

    Calls wait here, not in the queue of the executor: there, a call that ended early would keep its prompt until a
    thread is free.
    """

    def __init__(self, max_pending: int, num_cores: int | None = None) -> None:
        """`num_cores`: of this machine, if None."""
        num_cores = num_cores or os.cpu_count() or 1
        num_long = max(1, min(MAX_LONG_CALLS, num_cores // CORES_PER_LONG_CALL))
        self.max_pending = max_pending
        self._short, self._long = _Queue(1), _Queue(num_long)
        self._threads = ThreadPoolExecutor(1 + num_long, thread_name_prefix="validation")

    async def run(
        self,
        owner: Owner,
        timeout_s: float,
        num_bytes: int,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run `function`, unless it is short in a thread, and return its result. `num_bytes` is the size of its input.
        Owners with waiting calls take turns.

        Raises the exception of `function`, `QueueFull` beyond the share of `owner` in `max_pending`, and
        `DeadlineExceeded` after `timeout_s`.
        A call that ends early leaves the queue; if `function` has started, it runs to its end.
        """
        if num_bytes <= MAX_INLINE_BYTES:
            return function(*args, **kwargs)
        queue = self._short if num_bytes <= MAX_SHORT_BYTES else self._long
        pending = queue.pending
        if not pending.has_room(owner, 1, self.max_pending):
            raise QueueFull(
                f"{pending.total} requests wait for validation, {pending.of_host(owner)} of them of this client, "
                f"and max_queued is {self.max_pending}"
            )
        pending.add(owner, 1)
        try:
            async with asyncio.timeout(timeout_s):
                await queue.free_threads.acquire(owner)
                # Without the shield, a call that ends early would free a thread that still works. No variable holds the
                # future: its exception holds this frame, and the input would stay until the next garbage collection.
                return await asyncio.shield(self._start(queue, partial(function, *args, **kwargs)))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request was validated") from None
        finally:
            pending.add(owner, -1)

    def _start(self, queue: _Queue, call: Callable[[], R]) -> asyncio.Future[R]:
        result = asyncio.get_running_loop().run_in_executor(self._threads, call)
        result.add_done_callback(partial(_end, queue.free_threads))
        return result

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class _Queue:
    def __init__(self, num_threads: int) -> None:
        self.free_threads = FairSlots(num_threads)
        self.pending = OwnerLedger()


def _end(free_threads: FairSlots, result: asyncio.Future[Any]) -> None:
    free_threads.release()
    if not result.cancelled():
        result.exception()  # else asyncio logs the exception of an abandoned call
