"""The traffic of all routers in the newest minutes, and the demand that follows for the time after a start.

    change    one of SHORT_S has far more arrivals than the level suggests, or the longest of them far fewer
    level     requests/s of LONG_S, or since the last change, so that no mean mixes the rates before and after
    slope     of a line through TREND_S without a change, if it rises by more than chance explains
    forecast  level + slope x (the time of a start + half the time of the level)

Lengths are means over the requests that have finished in LENGTHS_S, or before, if these are few. A router counts from
its start, so a lost report changes nothing: the next one has its requests too.
"""

from __future__ import annotations

import math

from core.traffic import RequestTotals, RouterTraffic
from fleet.planner.prediction import Demand

SHORT_S = 5.0, 15.0, 60.0
LONG_S = 300.0
TREND_S = 600.0  # in half of it, chance looks like a rise so often that slow starts cost workers all day
TREND_STEP_S = 30.0
LENGTHS_S = 900.0
CHANGE = 0.25  # of the level; smaller changes are left to the slope
SURPRISE = 4.0  # standard deviations of a Poisson process
SILENT_S = 10.0  # without a report for so long, a router counts no more
FORGOTTEN_S = 3600.0  # ... and after so long it has ended
MIN_FINISHED = 20  # requests before their lengths mean anything

NOTHING = RequestTotals()


class TrafficLog:
    def __init__(self) -> None:
        self.last_busy_at = math.inf  # a request arrived, waited or ran, or a router reported for the first time
        self._newest: dict[str, tuple[float, RouterTraffic]] = {}  # by router
        self._added: dict[int, RequestTotals] = {}  # by second, what reports have added
        self._began_at: float | None = None  # the present rate: at the first report, or at a change
        self._lengths: RequestTotals | None = None  # of enough finished requests, as new as there are

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        """The first report of a router adds nothing: it may have counted for hours.

        The arrivals of a late report belong to all seconds since the one before.
        """
        known = self._newest.get(router_id)
        if self._began_at is None:
            self._began_at = now
        self._newest[router_id] = now, traffic
        if known is None:
            self.last_busy_at = now
            return
        added = traffic.totals.since(known[1].totals)
        if added.num_arrived or traffic.num_waiting or traffic.num_open:
            self.last_busy_at = now
        this, oldest = int(now), int(now - max(LENGTHS_S, TREND_S))
        seconds = range(min(int(known[0]) + 1, this), this + 1)
        for second in seconds[-int(TREND_S) :]:
            self._add(second, RequestTotals(num_arrived=added.num_arrived / len(seconds)))
        self._add(this, added._replace(num_arrived=0))
        self._notice_change(now)
        for second in [second for second in self._added if second <= oldest]:
            del self._added[second]
        for name in [name for name, (at, _) in self._newest.items() if at <= now - FORGOTTEN_S]:
            del self._newest[name]

    def _add(self, second: int, totals: RequestTotals) -> None:
        self._added[second] = self._added.get(second, NOTHING).plus(totals)

    # ---- now

    def heard(self, now: float) -> dict[str, RouterTraffic]:
        """The newest reports of the routers that are not silent."""
        return {name: traffic for name, (at, traffic) in self._newest.items() if at > now - SILENT_S}

    def totals(self, seconds: float, now: float) -> RequestTotals:
        """Totals of the requests of the last `seconds`."""
        newest = range(math.floor(now - seconds) + 1, math.floor(now) + 1)
        added = [self._added[second] for second in newest if second in self._added]
        return RequestTotals._make(map(sum, zip(NOTHING, *added, strict=True)))

    # ---- forecast

    def level(self, now: float) -> float:
        """Requests/s."""
        level_s = self._level_s(now)
        return self.totals(level_s, now).num_arrived / level_s

    def _level_s(self, now: float) -> float:
        """The time of the level."""
        return 1.0 if self._began_at is None else min(LONG_S, max(1.0, now - self._began_at))

    def _notice_change(self, now: float) -> None:
        """The square root of a Poisson count has a standard deviation of about 1/2, whatever its mean."""
        level, level_s = self.level(now), self._level_s(now)
        for seconds in SHORT_S:
            count, expected = self.totals(seconds, now).num_arrived, level * seconds
            is_chance = abs(math.sqrt(count) - math.sqrt(expected)) <= SURPRISE / 2.0
            is_small = abs(count - expected) <= CHANGE * expected
            is_early = count < expected and seconds < SHORT_S[-1]  # no worker leaves within seconds
            if seconds < level_s and not (is_chance or is_small or is_early):
                self._began_at = now - seconds
                return

    def slope(self, now: float) -> float:
        """Rise of the rate, in requests/s each second; 0 unless it is significant."""
        num_steps = int(TREND_S / TREND_STEP_S)
        if self._began_at is None or now - self._began_at < TREND_S:
            return 0.0
        counts = [0.0] * num_steps
        for second, added in self._added.items():
            age = int((now - second) / TREND_STEP_S)
            if age < num_steps:
                counts[num_steps - 1 - age] += added.num_arrived
        middle = (num_steps - 1) / 2.0
        spread = sum((step - middle) ** 2 for step in range(num_steps))
        rise = sum((step - middle) * count for step, count in enumerate(counts)) / spread  # arrivals, by step
        chance = math.sqrt(sum(counts) / num_steps / spread)
        return rise / TREND_STEP_S**2 if rise > SURPRISE / 2.0 * chance else 0.0

    def demand(self, now: float, ahead_s: float) -> Demand | None:
        """Forecast for `ahead_s` from now, without what waits; None until enough requests have finished."""
        newest = self.totals(LENGTHS_S, now)
        if newest.num_finished >= MIN_FINISHED:
            self._lengths = newest
        totals = self._lengths
        if totals is None:
            return None
        count = totals.num_finished
        mean = totals.uncached_tokens / count
        variance = max(0.0, totals.uncached_squared / count - mean**2)
        return Demand(
            rate=self.level(now) + self.slope(now) * (ahead_s + self._level_s(now) / 2.0),
            prompt_tokens=totals.prompt_tokens / count,
            uncached_tokens=max(1.0, mean),
            variation=variance / max(1.0, mean) ** 2,
            output_tokens=totals.output_tokens / count,
        )
