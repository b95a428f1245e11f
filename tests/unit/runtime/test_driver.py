"""The driver: one machine, its timer, and who is told when it has stopped."""

from __future__ import annotations

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
