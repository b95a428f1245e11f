"""WorkerRecord: how fast a worker releases blocks, and when its load was taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.lifecycle import ServiceRole
from core.scheduling.block_pool import Column
from router.routing.worker_record import ReleaseRate, WorkerRecord
from tests.unit.router.driving_router import SERVING, agent


def taken(*reports: tuple[float, int, int]) -> ReleaseRate:
    """Reports of (time, blocks held, blocks released since the start)."""
    rate = ReleaseRate()
    for now, num_held, num_released in reports:
        rate.take(replace(SERVING, ledger={Column.HELD: num_held}, num_released_blocks=num_released), now)
    return rate


def test_a_worker_that_holds_blocks_for_ten_seconds_releases_a_tenth_each_second() -> None:
    steady = [(float(second), 200, 20 * second) for second in range(60)]
    assert taken(*steady).blocks_per_s == pytest.approx(20.0, rel=0.02)


def test_time_without_requests_does_not_slow_the_release() -> None:
    steady = [(float(second), 200, 20 * second) for second in range(60)]
    idle = [(60.0 + second, 0, 1400) for second in range(300)]
    assert taken(*steady, *idle).blocks_per_s == 0.0, "nothing is held"
    assert taken(*steady, *idle, (400.0, 200, 1400)).blocks_per_s == pytest.approx(20.0, rel=0.4)


def test_a_view_has_the_time_of_its_load_and_not_of_a_later_report_without_one() -> None:
    record = WorkerRecord("d", ServiceRole.DECODE, agent("d"), SERVING, 5.0, "router", 2)
    assert record.view.reported_at == 5.0
    record.reported_at = 6.0
    record.refresh()
    assert record.view.reported_at == 5.0, "the load is unchanged since then"
    record.reported_at = 7.0
    record.take_load(SERVING)
    assert record.view.reported_at == 7.0
