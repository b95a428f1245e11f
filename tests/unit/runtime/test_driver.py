"""The driver: one machine, its timer, and what a failure of the machine or the shell stops."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from core.errors import QueueFull, TandemError, WorkerDrains, WorkerUnavailable
from core.machine import Tick
from runtime.driver import Driver


class Echo:
    """A machine that acts on each letter of a word, breaks on "bug" and refuses "full"."""

    def handle(self, event: str | Tick, _: float) -> list[str]:
        assert event != "bug"
        if event == "full":
            raise QueueFull("no room")
        return list(str(event))

    def next_deadline(self) -> float | None:
        return None

    def check(self) -> None:
        pass


async def test_after_a_machine_has_failed_news_is_dropped_and_calls_are_refused_at_once() -> None:
    done: list[str] = []
    failures: list[BaseException] = []
    driver: Driver[str, str] = Driver(Echo(), done.append, failures.append)
    driver.ask("a")
    with pytest.raises(TandemError, match="failed on this call") as caught:
        driver.ask("bug")
    assert not caught.value.retryable
    assert len(failures) == 1
    driver.post("news")
    with pytest.raises(WorkerUnavailable, match="has failed"):
        driver.ask("b")
    assert done == ["a"]


async def test_a_refused_event_reaches_its_sender_and_the_driver_goes_on() -> None:
    done: list[str] = []
    failures: list[BaseException] = []
    driver: Driver[str, str] = Driver(Echo(), done.append, failures.append)
    for send in (driver.post, driver.ask):
        with pytest.raises(QueueFull):
            send("full")
    driver.post("a")
    assert (done, failures) == (["a"], [])


@pytest.mark.parametrize("fault", [KeyError("ghost"), WorkerUnavailable("the transport is gone")])
async def test_an_exception_in_the_shell_is_fatal_and_no_refusal(fault: Exception) -> None:
    """Even a `TandemError`: the machine has changed, and a part of its actions was never performed."""
    done: list[str] = []
    failures: list[BaseException] = []
    handled: list[None] = []

    def perform(action: str) -> None:
        if action == "!":
            raise fault
        done.append(action)

    driver: Driver[str, str] = Driver(Echo(), perform, failures.append, lambda: handled.append(None))
    with pytest.raises(TandemError, match=f"failed on this call: {type(fault).__name__}") as caught:
        driver.ask("a!b")
    assert not caught.value.retryable
    assert driver.stopped
    driver.post("c")
    assert (done, failures, handled) == (["a"], [fault], [])


async def test_an_exception_after_the_last_action_is_fatal_too() -> None:
    failures: list[BaseException] = []

    def on_handled() -> None:
        raise RuntimeError("no such agent")

    driver: Driver[str, str] = Driver(Echo(), lambda _: None, failures.append, on_handled)
    with pytest.raises(RuntimeError, match="no such agent"):
        driver.post("a")
    assert driver.stopped
    assert [str(failure) for failure in failures] == ["no such agent"]


@pytest.mark.parametrize("error", [WorkerUnavailable, WorkerDrains])
async def test_a_stopped_driver_refuses_with_the_error_of_its_stop(error: type[TandemError]) -> None:
    driver: Driver[str, str] = Driver(Echo(), lambda _: None, lambda _: None)
    driver.stop(error, "stops")
    with pytest.raises(error, match="stops"):
        driver.ask("a")


class Alarm(Echo):
    """A number sets the deadline, in seconds from now; a due tick removes the deadline."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.num_early = 0

    def handle(self, event: str | Tick, now: float) -> list[str]:
        if isinstance(event, str):
            self.deadline = now + float(event) if event else self.deadline
            return []
        if self.deadline is None or now < self.deadline - 0.001:  # the resolution of the loop's clock
            self.num_early += 1
            return []
        self.deadline = None
        return ["rang"]

    def next_deadline(self) -> float | None:
        return self.deadline


async def test_a_deadline_is_one_tick_whether_it_stays_or_moves() -> None:
    rung: asyncio.Queue[str] = asyncio.Queue()
    alarm = Alarm()
    driver: Driver[str, str] = Driver(alarm, rung.put_nowait, lambda _: None)
    async with asyncio.timeout(10):
        driver.post("0.01")
        driver.post("")  # the deadline stays
        assert await rung.get() == "rang"
        driver.post("60")
        driver.post("0.01")  # the deadline moves closer
        assert await rung.get() == "rang"
        driver.post("0.01")
        driver.stop()
        driver.post("")
        await asyncio.sleep(0.03)
    assert rung.empty()
    assert alarm.num_early == 0


def test_a_deadline_that_has_passed_is_one_tick_on_uvloop() -> None:
    """For a past time, uvloop returns a handle that does not know the time."""
    rung: list[str] = []

    async def ring() -> None:
        driver: Driver[str, str] = Driver(Alarm(), rung.append, lambda _: None)
        driver.post("-1")
        driver.post("")  # the deadline stays
        await asyncio.sleep(0.01)

    uvloop.run(ring())
    assert rung == ["rang"]
