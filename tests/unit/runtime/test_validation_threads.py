"""ValidationThreads limits the calls that run, the calls that wait, and the time of each call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DeadlineExceeded, InvalidRequest, QueueFull
from runtime.fair_slots import FairSlots
from runtime.owner_ledger import Owner, OwnerLedger, network_of
from runtime.validation_threads import (
    CORES_PER_LONG_CALL,
    MAX_INLINE_BYTES,
    MAX_LONG_CALLS,
    MAX_SHORT_BYTES,
    ValidationThreads,
)
from tests.support.waiting import until

CLIENT, OTHER = ("here", ""), ("there", "")
SHORT, LONG = MAX_SHORT_BYTES, MAX_SHORT_BYTES + 1
NUM_LONG = 2
MAX_PENDING = 2 * (NUM_LONG + 2)  # of them, a client that is alone may hold half


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    pool = ValidationThreads(max_pending=MAX_PENDING, num_cores=NUM_LONG * CORES_PER_LONG_CALL)
    yield pool
    pool.close()


@pytest.fixture
def gate():  # type: ignore[no-untyped-def]
    """Opens at the end of the test, else a thread that waits would keep the process."""
    gate = threading.Event()
    yield gate
    gate.set()


@contextlib.asynccontextmanager
async def busy(pool: ValidationThreads, gate: threading.Event, num_calls: int = NUM_LONG) -> AsyncIterator[None]:
    """Long calls of a client until the end of the block, which opens the gate."""
    calls = [asyncio.create_task(pool.run(CLIENT, 20.0, LONG, gate.wait)) for _ in range(num_calls)]
    await asyncio.sleep(0)
    yield
    assert not any(call.done() for call in calls)
    gate.set()
    assert await asyncio.gather(*calls) == [True] * num_calls


async def test_a_refused_input_goes_with_its_exception_without_a_garbage_collection(pool: ValidationThreads) -> None:
    def refuse(_: _Prompt) -> None:
        raise InvalidRequest("text", "no")

    async def read() -> weakref.ref[_Prompt]:
        body = _Prompt()
        with pytest.raises(InvalidRequest):
            await pool.run(CLIENT, 5.0, LONG, refuse, body)
        return weakref.ref(body)

    gc.disable()
    try:
        bodies = [await read() for _ in range(3)]
        # A thread may have answered, and still hold its input.
        await until(lambda: [body() for body in bodies] == [None] * 3, "a thread or an exception keeps an input")
    finally:
        gc.enable()


async def test_a_call_runs_in_a_thread_unless_it_is_very_short(pool: ValidationThreads) -> None:
    own = threading.get_ident()
    assert await pool.run(CLIENT, 5.0, MAX_INLINE_BYTES, threading.get_ident) == own
    assert await pool.run(CLIENT, 5.0, MAX_INLINE_BYTES + 1, threading.get_ident) != own


async def test_the_exception_of_a_call_that_nobody_waits_for_is_not_logged(
    pool: ValidationThreads, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    started, ended = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        gate.wait()
        ended.set()
        raise InvalidRequest("text", "no")

    call = asyncio.create_task(pool.run(CLIENT, 5.0, LONG, fail))
    await asyncio.to_thread(started.wait, 5.0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    del call  # its traceback has the future
    gate.set()
    await asyncio.to_thread(ended.wait, 5.0)
    await asyncio.sleep(0.1)  # the exception reaches the loop after `ended`
    gc.collect()
    assert caplog.text == ""


async def test_calls_beyond_the_threads_wait_and_calls_beyond_the_bound_are_refused(
    pool: ValidationThreads, gate: threading.Event
) -> None:
    message = f"{NUM_LONG + 2} requests wait for validation, .* max_queued is {MAX_PENDING}"
    async with busy(pool, gate, NUM_LONG + 2):
        with pytest.raises(QueueFull, match=message) as refused:
            await pool.run(CLIENT, 20.0, LONG, max, 1, 2)
        assert refused.value.retry_after_s > 0
    assert await pool.run(CLIENT, 20.0, LONG, max, 1, 2) == 2


async def test_a_client_with_all_the_calls_that_it_may_have_leaves_room_for_another(gate: threading.Event) -> None:
    pool = ValidationThreads(max_pending=16, num_cores=1)

    async def fill(owner: Owner, num_bytes: int) -> int:
        """How many calls this client can add now."""
        for number in range(20):
            call = asyncio.create_task(pool.run(owner, 20.0, num_bytes, gate.wait))
            await asyncio.sleep(0)
            if call.done():
                assert isinstance(call.exception(), QueueFull)
                return number
            calls.append(call)
        raise AssertionError("no bound")

    calls = list[asyncio.Task[bool]]()
    assert [await fill(owner, LONG) for owner in (CLIENT, OTHER)] == [8, 4]
    assert await fill(CLIENT, SHORT) == 8, "long calls take no room of short ones"
    assert [await fill(("proxy", key), SHORT) for key in ("hostile", "honest")] == [4, 0], "4 were left"
    gate.set()
    assert all(await asyncio.gather(*calls))
    gate.clear()
    assert [await fill(("proxy", key), LONG) for key in ("hostile", "honest")] == [4, 2], "all room is given back"
    gate.set()
    await asyncio.gather(*calls)
    pool.close()


@pytest.mark.parametrize("max_pending", [1, 2])
async def test_the_smallest_bounds_let_one_call_in(max_pending: int) -> None:
    pool = ValidationThreads(max_pending, num_cores=1)
    for owner in (CLIENT, ("here", "key")):
        assert await pool.run(owner, 20.0, LONG, max, 1, 2) == 2
    pool.close()


async def test_a_call_that_waits_past_its_deadline_never_runs(pool: ValidationThreads, gate: threading.Event) -> None:
    ran = threading.Event()
    async with busy(pool, gate):
        with pytest.raises(DeadlineExceeded, match="before the request was validated"):
            await pool.run(CLIENT, 0.05, LONG, ran.set)
    assert await pool.run(CLIENT, 20.0, LONG, max, 1, 2) == 2
    assert not ran.is_set()


async def test_a_call_that_ends_early_leaves_nothing_in_the_queue(
    pool: ValidationThreads, gate: threading.Event
) -> None:
    late, cancelled = _Prompt(), _Prompt()
    gone = [weakref.ref(late), weakref.ref(cancelled)]
    async with busy(pool, gate):
        with pytest.raises(DeadlineExceeded):
            await pool.run(CLIENT, 0.01, LONG, id, late)
        call = asyncio.create_task(pool.run(CLIENT, 20.0, LONG, id, cancelled))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        del late, cancelled, call
        await asyncio.sleep(0)  # this task's last step holds the exception, whose traceback holds the arguments
        gc.collect()
        assert [prompt() for prompt in gone] == [None, None]
        assert not pool._long.free_threads._waiting


async def test_close_waits_for_no_call(pool: ValidationThreads, gate: threading.Event) -> None:
    async with busy(pool, gate):
        pool.close()


async def test_a_thread_is_free_again_only_when_its_function_has_ended(
    pool: ValidationThreads, gate: threading.Event
) -> None:
    started = threading.Event()
    begun = threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        gate.wait()

    calls = [asyncio.create_task(pool.run(CLIENT, 1.0, LONG, hold)) for _ in range(NUM_LONG)]
    for _ in range(NUM_LONG):
        assert await asyncio.to_thread(begun.acquire, timeout=20.0), "no thread has begun"
    for call in calls:
        with pytest.raises(DeadlineExceeded):
            await call
    waiting = asyncio.create_task(pool.run(CLIENT, 20.0, LONG, started.set))
    await asyncio.sleep(0.01)
    assert not started.is_set()
    gate.set()
    await waiting
    assert started.is_set()


async def test_a_short_call_does_not_wait_for_long_ones(pool: ValidationThreads, gate: threading.Event) -> None:
    async with busy(pool, gate, NUM_LONG + 1):
        assert await pool.run(CLIENT, 20.0, SHORT, max, 1, 2) == 2


@pytest.mark.parametrize(("num_cores", "most"), [(1, 1), (2, 1), (4, 1), (8, 2), (256, MAX_LONG_CALLS)])
async def test_long_calls_leave_most_cores_to_others(num_cores: int, most: int, gate: threading.Event) -> None:
    pool = ValidationThreads(20, num_cores)
    running = threading.Semaphore(0)

    def run() -> None:
        running.release()
        gate.wait()

    calls = [asyncio.create_task(pool.run(CLIENT, 20.0, LONG, run)) for _ in range(MAX_LONG_CALLS + 1)]
    for _ in range(most):
        assert await asyncio.to_thread(running.acquire, timeout=10.0)
    assert not running.acquire(timeout=0.01)
    gate.set()
    await asyncio.gather(*calls)
    pool.close()


class _Prompt:
    """Large, in production."""


# ---- Addresses and their keys take slots in turns, and no slot is lost or given twice, whoever is cancelled when.


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


STEPS = st.tuples(st.sampled_from(["call", "end", "cancel", "end and cancel", "turn"]), st.integers(0, 7))

OWNERS = [("here", ""), ("here", "key"), ("here", "other"), ("there", ""), ("there", "key")]


@given(owners=st.lists(st.sampled_from(OWNERS), max_size=12))
async def test_a_host_waits_for_one_call_of_each_other_host_and_a_key_for_one_of_each_other_key(
    owners: list[Owner],
) -> None:
    slots, order = FairSlots(1), list[Owner]()
    await slots.acquire(("first", ""))

    async def call(owner: Owner) -> None:
        await slots.acquire(owner)
        order.append(owner)
        slots.release()

    calls = [asyncio.create_task(call(owner)) for owner in owners]
    await turns()
    slots.release()
    await asyncio.gather(*calls)
    assert sorted(order) == sorted(owners)
    assert _in_turns([host for host, _ in order])
    for each in ("here", "there"):
        assert _in_turns([key for host, key in order if host == each])


def _in_turns(order: list[str]) -> bool:
    """Between two turns of one, each other that still waits has one."""
    rests = [(name, order[place + 1 :]) for place, name in enumerate(order)]
    return all(sorted(rest[: rest.index(name)]) == sorted({*rest} - {name}) for name, rest in rests if name in rest)


@given(num_slots=st.integers(1, 3), steps=st.lists(STEPS, min_size=8, max_size=40))
async def test_the_law_of_the_slots(num_slots: int, steps: list[tuple[str, int]]) -> None:
    slots, tasks, held = FairSlots(num_slots), list[asyncio.Task[None]](), list[asyncio.Event]()

    async def call(owner: Owner) -> None:
        await slots.acquire(owner)
        end = asyncio.Event()
        held.append(end)
        try:
            await end.wait()
        finally:
            held.remove(end)
            slots.release()

    for step, number in steps:
        match step:
            case "call":
                tasks.append(asyncio.create_task(call(OWNERS[number % len(OWNERS)])))
                await turns()
            case "turn":
                await asyncio.sleep(0)  # a cancel may come just after the slot
        if "end" in step and held:
            held[number % len(held)].set()
        open_calls = [task for task in tasks if not task.done()]
        if "cancel" in step and open_calls:
            open_calls[number % len(open_calls)].cancel()
        assert len(held) <= num_slots
    await turns()
    waiting = [task for task in tasks if not task.done()]
    assert len(held) == min(num_slots, len(waiting)), "nobody waits while a slot is free"
    num_turns = sum(len(turns) for keys in slots._waiting.values() for turns in keys.values())
    assert num_turns == len(waiting) - len(held), "a cancelled call keeps no place, and each other call has its own"
    for task in waiting:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(isinstance(end, Exception) for end in ends)
    assert (slots._num_free, slots._waiting) == (num_slots, {})


# ---- What clients hold is counted by address and by key, and a client that holds much leaves room for others.

LIMIT = 64
ANY_OWNERS = st.tuples(st.sampled_from(["here", "there", "elsewhere"]), st.sampled_from(["", "a", "b"]))


@given(st.lists(st.tuples(ANY_OWNERS, st.integers(1, 40), st.booleans()), max_size=40))
def test_an_address_holds_at_most_half_of_the_room_and_a_key_a_quarter_beside_the_last_that_it_took(
    steps: list[tuple[Owner, int, bool]],
) -> None:
    ledger, held = OwnerLedger(), list[tuple[Owner, int]]()
    for owner, amount, ends_one in steps:
        if ends_one and held:
            ended, size = held.pop(amount % len(held))
            ledger.add(ended, -size)
        if ledger.has_room(owner, amount, LIMIT):
            ledger.add(owner, amount)
            held.append((owner, amount))
            of_key = sum(size for each, size in held if each == owner)
            assert ledger.of_host(owner) <= LIMIT - ledger.total + amount, "never more than was free"
            assert 2 * ledger.of_host(owner) <= LIMIT + amount
            assert not owner[1] or 2 * of_key <= LIMIT // 2 + amount
        ledger.check()
        assert ledger.total == sum(size for _, size in held) <= LIMIT
    for owner, amount in held:
        ledger.add(owner, -amount)
    ledger.check()
    assert ledger.total == 0


def test_the_largest_owner_is_a_key_of_the_largest_address() -> None:
    ledger = OwnerLedger()
    for owner, amount in ((("here", ""), 5), (("there", "a"), 3), (("there", "b"), 4)):
        ledger.add(owner, amount)
    assert ledger.largest() == ("there", "b")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_a_client_of_ipv6_is_its_64_bit_network(address: str, network: str) -> None:
    assert network_of(address) == network
