"""BoundedPool limits the calls that run, the calls that wait, and the time of each call."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from core.errors import DeadlineExceeded, InvalidRequest, QueueFull
from router.bounded_pool import NUM_THREADS, BoundedPool


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    pool = BoundedPool(max_pending=NUM_THREADS + 2)
    yield pool
    pool.close()


@pytest.fixture
def gate():  # type: ignore[no-untyped-def]
    """Opens at the end of the test, else a thread that waits would keep the process."""
    gate = threading.Event()
    yield gate
    gate.set()


async def test_the_caller_gets_the_result_or_the_exception_of_the_function(pool: BoundedPool) -> None:
    assert await pool.run(5.0, max, 1, 2) == 2
    with pytest.raises(InvalidRequest, match="text: no"):
        await pool.run(5.0, _refuse)


async def test_calls_beyond_the_threads_wait_and_calls_beyond_the_bound_are_refused(
    pool: BoundedPool, gate: threading.Event
) -> None:
    calls = [asyncio.create_task(pool.run(20.0, gate.wait)) for _ in range(NUM_THREADS + 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=f"wait for validation, and max_queued is {NUM_THREADS + 2}") as refused:
        await pool.run(20.0, max, 1, 2)
    assert refused.value.retry_after_s > 0
    gate.set()
    assert await asyncio.gather(*calls) == [True] * len(calls)
    assert await pool.run(20.0, max, 1, 2) == 2


async def test_a_call_that_waits_past_its_deadline_never_runs(pool: BoundedPool, gate: threading.Event) -> None:
    ran = threading.Event()
    busy = [asyncio.create_task(pool.run(20.0, gate.wait)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match="before the request was validated"):
        await pool.run(0.05, ran.set)
    gate.set()
    await asyncio.gather(*busy)
    assert await pool.run(20.0, max, 1, 2) == 2
    assert not ran.is_set()


async def test_a_call_that_ends_early_leaves_nothing_in_the_queue(pool: BoundedPool, gate: threading.Event) -> None:
    busy = [asyncio.create_task(pool.run(20.0, gate.wait)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    late, cancelled = _Prompt(), _Prompt()
    gone = [weakref.ref(late), weakref.ref(cancelled)]
    with pytest.raises(DeadlineExceeded):
        await pool.run(0.01, id, late)
    call = asyncio.create_task(pool.run(20.0, id, cancelled))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    del late, cancelled, call
    await asyncio.sleep(0)  # this task's last step holds the exception, whose traceback holds the arguments
    gc.collect()
    assert [prompt() for prompt in gone] == [None, None]  # while every thread is still busy
    gate.set()
    await asyncio.gather(*busy)


async def test_a_thread_is_free_again_only_when_its_function_has_ended(
    pool: BoundedPool, gate: threading.Event
) -> None:
    started = threading.Event()
    for _ in range(NUM_THREADS):
        with pytest.raises(DeadlineExceeded):
            await pool.run(0.01, gate.wait)
    waiting = asyncio.create_task(pool.run(20.0, started.set))
    await asyncio.sleep(0.01)
    assert not started.is_set()
    gate.set()
    await waiting
    assert started.is_set()


class _Prompt:
    """Large, in production."""


def _refuse() -> None:
    raise InvalidRequest("text", "no")
