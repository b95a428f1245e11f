"""What the planner plans by: predicted times, backlogs, forecasts, the quiet time and the log of the traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from fleet.planner.backlog import backlog_after
from fleet.planner.prediction import Demand, FleetModel, WorkerModel
from fleet.planner.quiet_time import MOST_S, REGRET_S, REMEMBERED_S, QuietTime
from fleet.planner.recent_forecasts import RecentForecasts
from fleet.planner.traffic_log import CHANGE, TrafficLog
from tests.unit.fleet.driving_fleet import D, P
from tests.unit.fleet.test_planner import MODEL

DEMAND = Demand(rate=6.0, prompt_tokens=8000, uncached_tokens=8000, variation=0.0, output_tokens=300)


def test_a_queue_that_ends_before_a_new_worker_could_serve_is_no_backlog() -> None:
    model = FleetModel(MODEL, MODEL)
    spare = model.capacity(2, 2, DEMAND) - DEMAND.rate
    assert spare > 0.0
    assert backlog_after(20.0, 10.0 * spare, (2, 2), [], model, DEMAND) == 0.0
    assert backlog_after(20.0, 30.0 * spare, (2, 2), [], model, DEMAND) == pytest.approx(10.0 * spare)


def test_a_worker_that_starts_counts_from_when_it_serves() -> None:
    model, demand = FleetModel(MODEL, MODEL), replace(DEMAND, rate=12.0)
    one, two = (model.capacity(1, num_decode, demand) for num_decode in (1, 2))
    assert one < two < demand.rate
    late = backlog_after(20.0, 0.0, (1, 1), [(90.0, P), (15.0, D)], model, demand)
    assert late == pytest.approx(15.0 * (demand.rate - one) + 5.0 * (demand.rate - two))


@given(
    rate=st.floats(0.1, 50.0),
    prompt=st.integers(1, 30_000),
    output=st.integers(1, 2000),
    variation=st.floats(0.0, 3.0),
    num_prefill=st.integers(0, 12),
    num_decode=st.integers(1, 12),
)
def test_one_more_worker_is_never_slower(
    rate: float, prompt: int, output: int, variation: float, num_prefill: int, num_decode: int
) -> None:
    demand = Demand(rate, prompt, max(1.0, prompt * 0.7), variation, output)
    model = FleetModel(MODEL, MODEL)
    times = model.times(num_prefill, num_decode, demand)
    with_decode = model.times(num_prefill, num_decode + 1, demand)
    assert with_decode.tpot_s <= times.tpot_s * (1 + 1e-9)
    assert with_decode.ttft_s <= times.ttft_s * (1 + 1e-9)
    if num_prefill:
        assert model.times(num_prefill + 1, num_decode, demand).ttft_s <= times.ttft_s * (1 + 1e-9)


def test_the_worker_in_the_middle_stands_for_its_pool() -> None:
    costs = [None, *(replace(MODEL.cost, token_s=seconds) for seconds in (5e-5, 1e-5, 4e-5, 2e-5, 3e-5))]
    workers = [WorkerTraffic(str(number), P, cost, 0.05, 8192, 400_000, 0) for number, cost in enumerate(costs)]
    model = WorkerModel.of(workers)
    assert model is not None
    assert model.cost.token_s == 3e-5
    assert WorkerModel.of(workers[:1]) is None


def test_the_busiest_forecast_of_the_quiet_time_decides() -> None:
    forecasts = RecentForecasts()
    assert forecasts.busiest(2.0, 10.0, 100.0) is None
    assert forecasts.busiest(5.0, 10.0, 105.0) is None
    assert forecasts.busiest(1.0, 10.0, 110.0) == 5.0
    assert forecasts.busiest(3.0, 10.0, 115.0) == 5.0
    assert forecasts.busiest(1.0, 10.0, 116.0) == 3.0
    forecasts.clear()
    assert forecasts.busiest(1.0, 10.0, 117.0) is None


def test_a_worker_that_came_back_within_the_hour_doubles_the_quiet_time_for_half_a_day() -> None:
    quiet = QuietTime()
    assert quiet.seconds(120.0, 0.0) == 240.0
    quiet.grew(0.0)  # nothing had left
    quiet.shrunk(10.0)
    quiet.grew(20.0)
    quiet.grew(30.0)
    assert quiet.seconds(120.0, 30.0) == 480.0
    quiet.shrunk(100.0)
    quiet.grew(100.0 + REGRET_S)  # too late for a regret
    assert quiet.seconds(120.0, 4000.0) == 480.0
    for at in range(4000, 4050, 10):
        quiet.shrunk(at)
        quiet.grew(at + 5.0)
    assert quiet.seconds(120.0, 5000.0) == MOST_S
    assert quiet.seconds(MOST_S, 5000.0) == 2 * MOST_S  # as long as without a regret
    assert quiet.seconds(120.0, 4050.0 + REMEMBERED_S) == 240.0


class Reports:
    """A router that reports once a second to a log."""

    def __init__(self) -> None:
        self.log, self.now, self.totals, self._owed = TrafficLog(), 1000.0, RequestTotals(), 0.0
        self.report(0)

    def report(self, count: int, output: int = 300) -> None:
        added = RequestTotals(count, count, count, count, 8000 * count, 8000 * count, 6.4e7 * count, output * count)
        self.totals = self.totals.plus(added)
        self.now += 1.0
        self.log.note("router-0", RouterTraffic(self.totals, 0, 0, 1.0, ()), self.now)

    def run(self, seconds: int, rate: float, rise: float = 0.0, output: int = 300) -> None:
        for second in range(seconds):
            self._owed += rate + rise * second
            count, self._owed = int(self._owed), self._owed % 1.0
            self.report(count, output)


def test_a_step_of_the_rate_is_no_slope_and_no_mean_mixes_both_rates() -> None:
    reports = Reports()
    reports.run(400, rate=1.0)
    reports.run(100, rate=3.0)
    assert reports.log.level(reports.now) == pytest.approx(3.0, rel=0.1)
    assert reports.log.slope(reports.now) == 0.0
    reports.run(100, rate=0.5)
    assert reports.log.level(reports.now) < 1.0


def test_seven_arrivals_in_five_seconds_are_chance_where_one_is_usual() -> None:
    reports = Reports()
    reports.run(300, rate=0.2)
    reports.report(6)
    assert reports.log.totals(5.0, reports.now).num_arrived == 7
    assert reports.log.level(reports.now) < 0.3


def test_a_ramp_is_no_change_and_the_forecast_is_not_late() -> None:
    reports = Reports()
    reports.run(900, rate=100.0, rise=0.2)
    assert CHANGE * 100.0 > 60.0 * 0.2
    demand = reports.log.demand(reports.now, ahead_s=50.0)
    assert demand is not None
    assert demand.rate == pytest.approx(100.0 + 950 * 0.2, rel=0.01)


def test_lengths_are_means_of_a_quarter_of_an_hour() -> None:
    reports = Reports()
    reports.run(200, rate=1.0, output=200)
    reports.run(400, rate=0.0)
    reports.run(30, rate=1.0, output=1000)  # the longest outputs end last
    demand = reports.log.demand(reports.now, ahead_s=0.0)
    assert demand is not None
    assert demand.output_tokens == pytest.approx((200 * 200 + 30 * 1000) / 230, rel=0.05)
