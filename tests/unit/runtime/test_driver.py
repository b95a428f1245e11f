"""The driver: one machine, its timer, and who is told when it has stopped."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import TandemError, WorkerUnavailable
from core.machine import Tick
from runtime.driver import Driver


class Echo:
    """A machine that acts on each word; on "bug" it breaks."""

    def handle(self, event: str | Tick, _: float) -> list[str]:
        assert event != "bug"
        return [str(event)]

    def next_deadline(self) -> float | None:
        return None

    def check(self) -> None:
        pass


async def test_after_a_machine_has_failed_news_is_dropped_and_who_asks_is_refused_at_once() -> None:
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


async def test_a_stopped_driver_refuses_too() -> None:
    driver: Driver[str, str] = Driver(Echo(), lambda _: None, lambda _: None)
    driver.stop()
    with pytest.raises(WorkerUnavailable, match="stops"):
        driver.ask("a")


class Alarm(Echo):
    """Each number is a deadline, in seconds from then; a tick that is due takes it away."""

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
        driver.post("")  # it stays
        assert await rung.get() == "rang"
        driver.post("60")
        driver.post("0.01")  # it comes nearer
        assert await rung.get() == "rang"
        driver.post("0.01")
        driver.stop()
        driver.post("")
        await asyncio.sleep(0.03)
    assert rung.empty()
    assert alarm.num_early == 0
