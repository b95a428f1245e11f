"""The requests that still wait when a worker that is wanted now begins to serve.

    now           a start ends       another one ends       now + start_s
     |   serving   |   serving + 1    |    serving + 2       |
     +-------------+------------------+----------------------+

Each part adds (rate - capacity) x its length. So a worker that starts is not ordered again for the queue that grows
meanwhile, and a queue that ends before a new worker could serve asks for none.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.lifecycle import ServiceRole
from fleet.planner.prediction import Demand, FleetModel

P, D = ServiceRole.PREFILL, ServiceRole.DECODE

Coming = tuple[float, ServiceRole]  # a worker serves after so many seconds


def backlog_after(
    seconds: float,
    num_queued: float,
    serving: tuple[int, int],
    coming: Iterable[Coming],
    model: FleetModel,
    demand: Demand,
) -> float:
    """`serving`: prefill and decode workers. `num_queued`: requests that wait now."""
    sizes = {P: serving[0], D: serving[1]}
    at = 0.0
    for ready_s, role in [*sorted(coming, key=lambda worker: worker[0]), (seconds, None)]:
        part_s = min(ready_s, seconds) - at
        if part_s > 0.0 and (num_queued or not model.follows(sizes[P], sizes[D], demand)):
            growth = demand.rate - model.capacity(sizes[P], sizes[D], demand)
            num_queued = max(0.0, num_queued + growth * part_s)
        at += max(0.0, part_s)
        if role is not None:
            sizes[role] += 1
    return num_queued
