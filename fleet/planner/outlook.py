"""The predicted times of pool sizes for one forecast, and the comparison with the wanted times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleet.planner.prediction import Demand, FleetModel, Times

NEARLY = 1.15  # times the best that the largest sizes would reach

Sizes = tuple[int, int]  # prefill, decode


@dataclass(frozen=True, slots=True)
class Outlook:
    model: FleetModel
    demand: Demand
    slo_ttft_s: float
    slo_tpot_s: float  # inf = none
    largest: Sizes
    best: Times  # of the largest sizes: no fleet of these workers goes below
    drain_rate: float = 0.0  # requests/s of a backlog, which the sizes work off beside the demand

    @classmethod
    def of(cls, model: FleetModel, demand: Demand, slo_ttft_s: float, slo_tpot_s: float, largest: Sizes) -> Outlook:
        return cls(model, demand, slo_ttft_s, slo_tpot_s, largest, model.times(*largest, demand))

    def times(self, sizes: Sizes) -> Times:
        return self.model.times(*sizes, self.demand)

    def at_rate(self, rate: float) -> Outlook:
        demand = replace(self.demand, rate=rate)
        return replace(self, demand=demand, best=self.model.times(*self.largest, demand))

    def holds(self, sizes: Sizes, share: float = 1.0) -> bool:
        """Whether the times are within a share of the wanted ones, or nearly as short as they can be, and the backlog
        ends.

        A long prompt may take longer than the wanted time on a worker of its own. A backlog asks for no wanted times:
        its requests are late already.
        """
        times = self.times(sizes)
        ttft_s = max(share * self.slo_ttft_s, NEARLY * self.best.ttft_s)
        tpot_s = max(share * self.slo_tpot_s, NEARLY * self.best.tpot_s)
        if math.isinf(times.ttft_s) or times.ttft_s > ttft_s or times.tpot_s > tpot_s:
            return False
        if not self.drain_rate:
            return True
        return self.model.follows(*sizes, replace(self.demand, rate=self.demand.rate + self.drain_rate))

    def frontier(self, prefills: range, decodes: range) -> Iterator[Sizes]:
        """For each number of decode workers, the fewest prefill workers that hold the wanted times.

        More decode workers never need more prefill workers, so one walk along the edge finds them all.
        """
        num_prefill = prefills.stop - 1
        for num_decode in decodes:
            if not self.holds((num_prefill, num_decode)):
                continue
            while num_prefill > prefills.start and self.holds((num_prefill - 1, num_decode)):
                num_prefill -= 1
            yield num_prefill, num_decode
