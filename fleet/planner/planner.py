"""The planner: sizes the two pools of workers by the traffic (docs/planner.md, docs/adr/0054).

Once a second it looks at what the routers have counted, and compares pool sizes (P, D):

    the sizes miss the wanted times at the forecast   -> the cheapest sizes that hold them, at once. A worker of a pool
                                                         that gets smaller switches its role before another one starts
    one size smaller would hold EASY_SHARE of the wanted times at the busiest forecast of the quiet time
                                                      -> smaller by one, at most once in SHRINK_INTERVAL_S
    a backlog lasts until a new worker would serve    -> sizes that also work it off in DRAIN_STARTS starts
    no request for `idle_s`                           -> pools with a minimum of 0 become empty; the next request that
                                                         waits brings the sizes back
    no router reports, or too few requests have ended -> the sizes stay, and the plan says why

It decides about sizes only; FleetMachine starts, drains and switches. Nothing here waits or reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from core.config import PlannerConfig
from core.fleet_control import FleetStatus, PlanStatus, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.traffic import RouterTraffic, WorkerTraffic
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner.backlog import backlog_after
from fleet.planner.outlook import Outlook, Sizes
from fleet.planner.prediction import FleetModel, Times, WorkerModel
from fleet.planner.quiet_time import QuietTime
from fleet.planner.recent_forecasts import RecentForecasts
from fleet.planner.start_times import StartTimes
from fleet.planner.traffic_log import LONG_S, TrafficLog

EASY_SHARE = 0.8  # of the wanted times, which a smaller fleet must hold
CHANCE = 2.0  # ... at a rate so many standard deviations higher, so that chance does not bring the worker back
SHRINK_INTERVAL_S = 60.0  # the least time between two shrinks
DRAIN_STARTS = 0.5  # the sizes work off a backlog in so many start-ups
LEAST_DRAIN_S = 30.0
ATTAINMENT_S = 300.0  # the status shows the attainment of this time
JUDGED_S = 60.0  # a decision is judged by this time, which begins when its workers serve
# If no allowed sizes are enough, plan for 8 smaller backlogs, then for 40 rates, each 10 % lower.
DRAIN_CUTS = 8
CUT, MAX_CUTS = 0.9, 40
MAX_SIZE = 1024  # of a pool, in a search
P, D = POOLS = ServiceRole.PREFILL, ServiceRole.DECODE

PlanAction = ScaleTo | SwitchRole | FleetMessage


@dataclass(frozen=True, slots=True)
class _Decision:
    sizes: Sizes
    times: Times
    rate: float
    judged_at: float


class Planner:
    def __init__(self, config: PlannerConfig, *, local_prefill: bool = True, can_switch: bool = True) -> None:
        """`local_prefill`: decode workers compute prompts beside prefill workers. `can_switch`: of roles."""
        self.config = config
        self.local_prefill, self._can_switch = local_prefill, can_switch
        self.log = TrafficLog()
        self.starts = StartTimes()
        self._pinned: set[ServiceRole] = set()
        self._forecasts = RecentForecasts()
        self._quiet = QuietTime()
        self._before_idle: Sizes | None = None  # sizes to return to
        self._decision: _Decision | None = None  # not judged yet
        self._why = "has not planned yet"
        self._was_ready = False  # every service has served at the same time
        # For the present plan:
        self._heard: list[RouterTraffic] = []
        self._workers: dict[str, WorkerTraffic] = {}  # by service id; each router has the reports of every worker
        self._may_shrink = False
        self._num_queued = 0.0  # requests

    # ---- reports and pins

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        self.log.note(router_id, traffic, now)

    def pin(self, roles: Collection[ServiceRole], only: bool = False) -> None:
        """An operator has set the sizes of these pools, so they stay. With `only`, no other pool stays."""
        self._pinned = (set() if only else self._pinned) | (set(roles) & set(POOLS))

    @property
    def pinned(self) -> tuple[ServiceRole, ...]:
        """Pools whose sizes an operator has set."""
        return tuple(role for role in POOLS if role in self._pinned)

    @property
    def start_s(self) -> float:
        """Of a worker that it brings when requests wait; 0 if it brings none. A start may take longer than those before
        it, on a busy machine or a new one: the expected time holds until one takes longer."""
        brings = self.config.enabled and not self.config.min_decode and D not in self._pinned
        return max(self.config.start_s, self.starts.longest(self.config.start_s)) if brings else 0.0

    def status(self, now: float) -> PlanStatus:
        totals = self.log.totals(ATTAINMENT_S, now)
        return PlanStatus(
            enabled=self.config.enabled,
            pinned=self.pinned,
            plan=self._why if self.config.enabled else "",
            rate=self.log.level(now),
            num_ended=totals.num_ended,
            attainment=totals.num_within / totals.num_ended if totals.num_ended else 0.0,
        )

    # ---- decisions

    def plan(self, status: FleetStatus, now: float) -> list[PlanAction]:
        """Call it once a second, with the fleet as it is."""
        self.starts.note(status, now)
        if not self.config.enabled:
            return []
        if status.rolling:
            return self._hold("holds its sizes during a roll")
        serving = {slot.service_id for slot in self._serving(ServiceRole.ROUTER, status)}
        heard = self.log.heard(now)
        self._heard = [traffic for name, traffic in heard.items() if name in serving]
        if not self._heard:
            return self._hold("holds its sizes: no router has reported")
        self._workers = {worker.service_id: worker for traffic in self._heard for worker in traffic.workers}
        self._may_shrink = serving <= heard.keys() and self._has_served(status)
        sizes = status.wanted[P], status.wanted[D]
        start_s = self.starts.longest(self.config.start_s)
        return [*self._judge(now), *self._sized(sizes, status, start_s, now)]

    def _has_served(self, status: FleetStatus) -> bool:
        """A worker that starts for the first time is not idle."""
        self._was_ready = self._was_ready or all(slot.state is SlotState.SERVING for slot in status.slots)
        return self._was_ready

    def _hold(self, why: str) -> list[PlanAction]:
        self._forecasts.clear()
        self._why = why
        return []

    def _sized(self, sizes: Sizes, status: FleetStatus, start_s: float, now: float) -> list[PlanAction]:
        if not sizes[1] and (D in self._pinned or not self.config.min_decode):
            return self._scale_from_zero(sizes, status)
        bounded = self._bounded(sizes)
        if bounded != sizes:
            return self._resize(sizes, bounded, status, "its bounds have changed")
        if self._may_shrink and now - self.log.last_busy_at >= self.config.idle_s:
            return self._scale_to_minimum(sizes, status)
        outlook = self._outlook(sizes, status, start_s, now)
        if outlook is None:
            return self._hold("holds its sizes: too few requests have ended")
        self._why = f"{_sizes_text(sizes)} for {outlook.demand}: {outlook.times(sizes)}"
        if outlook.holds(sizes) and sum(sizes) <= self._most:
            wanted = self._smaller(sizes, outlook, self._quiet.seconds(start_s, now), now)
        else:
            self._forecasts.clear()
            wanted = self._grown(sizes, self._cheapest(sizes, outlook))
            if wanted == sizes:
                self._why += "; no larger size is allowed"
            else:
                self._quiet.grew(now)
        if wanted == sizes:
            return []
        before, after = outlook.times(sizes), outlook.times(wanted)
        self._decision = _Decision(wanted, after, outlook.demand.rate, now + start_s + JUDGED_S)
        reason = f"{outlook.demand}: {before} -> {after}"
        return self._resize(sizes, wanted, status, reason)

    def _outlook(self, sizes: Sizes, status: FleetStatus, start_s: float, now: float) -> Outlook | None:
        """One start-up ahead; None if nothing is known of the requests or of the workers."""
        demand, workers = self.log.demand(now, start_s), self._workers.values()
        models = [WorkerModel.of([worker for worker in workers if worker.role is role]) for role in POOLS]
        known = [model for model in models if model is not None]
        if demand is None or not known:
            return None
        prefill, decode = (model or known[0] for model in models)
        model = FleetModel(prefill, decode, self.local_prefill)
        # A prompt that each worker computes now does not wait.
        prompt_s, _ = prefill.prompt_s(demand)
        num_prompts = sum(max(0.0, worker.prompt_backlog_s / prompt_s - 1.0) for worker in workers)
        self._num_queued = self._num_waiting + num_prompts
        serving = len(self._serving(P, status)), len(self._serving(D, status))
        coming = self.starts.coming(status, start_s, now)
        present = replace(demand, rate=self.log.level(now))
        backlog = backlog_after(start_s, self._num_queued, serving, coming, model, present)
        prefills, decodes = self._ranges(sizes)
        slo_ttft_s = min(traffic.slo_ttft_s for traffic in self._heard)
        step_limit_s = max(worker.step_limit_s for worker in workers)
        largest = prefills.stop - 1, decodes.stop - 1
        outlook = Outlook.of(model, demand, slo_ttft_s, step_limit_s or math.inf, largest)
        return replace(outlook, drain_rate=backlog / max(LEAST_DRAIN_S, DRAIN_STARTS * start_s))

    @property
    def _num_waiting(self) -> int:
        return sum(traffic.num_waiting for traffic in self._heard)

    # ---- the sizes

    def _ranges(self, sizes: Sizes) -> tuple[range, range]:
        """The allowed sizes of each pool. A pinned pool keeps its size."""
        config = self.config
        prefills = range(config.min_prefill, min(config.max_prefill, MAX_SIZE) + 1)
        decodes = range(max(1, config.min_decode), min(config.max_decode, MAX_SIZE) + 1)
        return (
            range(sizes[0], sizes[0] + 1) if P in self._pinned else prefills,
            range(sizes[1], sizes[1] + 1) if D in self._pinned else decodes,
        )

    def _bounded(self, sizes: Sizes) -> Sizes:
        pairs = zip(sizes, self._ranges(sizes), strict=True)
        prefill, decode = (min(max(size, allowed.start), allowed.stop - 1) for size, allowed in pairs)
        return prefill, decode

    @property
    def _most(self) -> int:
        """Workers of both pools together."""
        return self.config.max_workers or 2 * MAX_SIZE

    def _price(self, sizes: Sizes) -> float:
        return sizes[0] * self.config.prefill_price + sizes[1] * self.config.decode_price

    def _cheapest(self, present: Sizes, wanted: Outlook) -> Sizes:
        """Of those that hold the wanted times at the rate and work off the backlog; or as much of the backlog, and then
        of the rate, as any sizes can follow. The present ones stay if they can follow that, too."""
        prefills, decodes = self._ranges(present)
        for outlook in _eased(wanted):
            if outlook.holds(present) and sum(present) <= self._most:
                return present
            busier = self._busier(outlook)
            holding = [
                self._raised(sizes, present, busier)
                for sizes in outlook.frontier(prefills, decodes)
                if sum(sizes) <= self._most
            ]
            if holding:
                return min(holding, key=lambda sizes: (self._price(sizes), _num_changes(present, sizes)))
        return present

    def _raised(self, sizes: Sizes, present: Sizes, busier: Outlook) -> Sizes:
        """A pool gives workers to the other one only if it could also shrink, or if the limits leave no other way."""
        raised = max(sizes[0], present[0]), max(sizes[1], present[1])
        can_give = not self._num_queued and busier.holds(sizes, EASY_SHARE)
        return sizes if can_give or sum(raised) > self._most else raised

    def _busier(self, outlook: Outlook) -> Outlook:
        rate = outlook.demand.rate
        return outlook.at_rate(rate + CHANCE * math.sqrt(rate / LONG_S))

    def _grown(self, sizes: Sizes, wanted: Sizes) -> Sizes:
        """A pool that may get smaller loses only the workers that change their roles, if the limits allow."""
        gain = sum(max(0, size - had) for size, had in zip(wanted, sizes, strict=True)) if self._can_switch else 0
        prefill, decode = (max(size, had - gain) for size, had in zip(wanted, sizes, strict=True))
        return (prefill, decode) if prefill + decode <= self._most else wanted

    def _smaller(self, sizes: Sizes, outlook: Outlook, quiet_s: float, now: float) -> Sizes:
        """One size smaller, if it would have been enough for `quiet_s`; the one that saves most."""
        if not self._may_shrink or outlook.drain_rate:
            self._forecasts.clear()
            return sizes
        rate = self._forecasts.busiest(outlook.demand.rate, quiet_s, now)
        if rate is None or self._quiet.since_shrunk(now) < SHRINK_INTERVAL_S:
            return sizes
        busiest = self._busier(outlook.at_rate(rate))
        candidates = {P: (sizes[0] - 1, sizes[1]), D: (sizes[0], sizes[1] - 1)}
        easy = [
            smaller
            for role, smaller in candidates.items()
            if role not in self._pinned and self._bounded(smaller) == smaller and busiest.holds(smaller, EASY_SHARE)
        ]
        wanted = min(easy, key=self._price, default=sizes)
        if wanted != sizes:
            self._quiet.shrunk(now)
        return wanted

    # ---- acting

    def _resize(self, sizes: Sizes, wanted: Sizes, status: FleetStatus, reason: str) -> list[PlanAction]:
        self._why = f"{_sizes_text(wanted)}: {reason}"
        actions: list[PlanAction] = [FleetMessage("planner", f"wants {_sizes_text(wanted)}", reason, printed=False)]
        for switch in self._switches(sizes, wanted, status):
            actions.append(switch)
            change = 1 if switch.role is P else -1
            sizes = sizes[0] + change, sizes[1] - change
        changed = {role: size for role, size, had in zip(POOLS, wanted, sizes, strict=True) if size != had}
        if changed:
            shrinking = [role for role, size, had in zip(POOLS, wanted, sizes, strict=True) if size < had]
            actions.append(ScaleTo(changed, tuple(self._leaving(shrinking, status))))
        return actions

    def _switches(self, sizes: Sizes, wanted: Sizes, status: FleetStatus) -> list[SwitchRole]:
        """Workers of a pool that gets smaller, for the pool that grows: those with the least KV to move."""
        change = {role: size - had for role, size, had in zip(POOLS, wanted, sizes, strict=True)}
        less, more = sorted(POOLS, key=change.__getitem__)
        count = min(-change[less], change[more]) if self._can_switch else 0
        slots = sorted(self._serving(less, status), key=self._held_tokens)
        # A worker that does not serve yet takes no place of one that does.
        count = max(0, min(count, len(slots) - (wanted[1] if less is D else 0)))
        return [SwitchRole(slot.name, more) for slot in slots[:count]]

    def _leaving(self, shrinking: list[ServiceRole], status: FleetStatus) -> Iterator[str]:
        """The order in which workers of shrinking pools leave: first those that are alone on their machine, then those
        with the least KV to move."""
        on_machine = Counter(slot.machine for slot in status.slots)
        for role in shrinking:
            slots = self._serving(role, status)
            yield from (
                slot.name
                for slot in sorted(slots, key=lambda slot: (on_machine[slot.machine], self._held_tokens(slot)))
            )

    def _serving(self, role: ServiceRole, status: FleetStatus) -> list[SlotStatus]:
        """The slots that serve and stay. A slot that leaves has a reason."""
        return [s for s in status.slots if s.role is role and s.state is SlotState.SERVING and not s.reason]

    def _held_tokens(self, slot: SlotStatus) -> int:
        worker = self._workers.get(slot.service_id)
        return 0 if worker is None else worker.held_tokens

    def _scale_to_minimum(self, sizes: Sizes, status: FleetStatus) -> list[PlanAction]:
        """After `idle_s` without a request, only the minimum stays."""
        least = tuple(
            size if role in self._pinned else minimum
            for role, size, minimum in zip(POOLS, sizes, (self.config.min_prefill, self.config.min_decode), strict=True)
        )
        if least == sizes:
            return self._hold(f"{_sizes_text(sizes)}: no request for {self.config.idle_s:g} s")
        self._before_idle = sizes
        self._forecasts.clear()
        return self._resize(sizes, (least[0], least[1]), status, f"no request for {self.config.idle_s:g} s")

    def _scale_from_zero(self, sizes: Sizes, status: FleetStatus) -> list[PlanAction]:
        """Without a decode worker every request waits, so the first one brings the pools back."""
        if D in self._pinned:
            return self._hold("holds its sizes: the decode pool is pinned at 0")
        if not self._num_waiting:
            return self._hold("rests until a request comes")
        num_prefill, num_decode = self._before_idle or (sizes[0], 1)
        if P in self._pinned:
            num_prefill = sizes[0]
        num_decode = max(1, min(num_decode, self._most - num_prefill))
        wanted = self._bounded((num_prefill, num_decode))
        return self._resize(sizes, wanted, status, f"{self._num_waiting} requests wait")

    def _judge(self, now: float) -> list[PlanAction]:
        """Tell how far off the last decision was, when its workers have served for a while."""
        decision = self._decision
        if decision is None or now < decision.judged_at:
            return []
        self._decision = None
        seen = self.log.totals(JUDGED_S, now)
        if not seen.num_finished:
            return []
        was = (
            f"mean TTFT {decision.times.mean_ttft_s:.3g} s, was {seen.first_token_s / seen.num_finished:.3g} s; "
            f"{decision.rate:.3g} requests/s, were {seen.num_arrived / JUDGED_S:.3g}; "
            f"{seen.num_within / max(1, seen.num_ended):.0%} within the wanted times"
        )
        return [FleetMessage("planner", f"had predicted for {_sizes_text(decision.sizes)}", was, printed=False)]


def _eased(outlook: Outlook) -> Iterator[Outlook]:
    """With less and less of the backlog, and then of the rate."""
    for cut in range(DRAIN_CUTS if outlook.drain_rate else 0):
        yield replace(outlook, drain_rate=outlook.drain_rate * (1.0 - cut / DRAIN_CUTS))
    for cut in range(MAX_CUTS):
        yield replace(outlook.at_rate(outlook.demand.rate * CUT**cut), drain_rate=0.0)


def _num_changes(present: Sizes, sizes: Sizes) -> int:
    """Starts and drains; a role switch is one change."""
    return max(abs(sizes[0] - present[0]), abs(sizes[1] - present[1]))


def _sizes_text(sizes: Sizes) -> str:
    return f"{sizes[0]} prefill, {sizes[1]} decode"
