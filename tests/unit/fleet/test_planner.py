"""The planner sizes the pools by the traffic: it grows at once, shrinks slowly, and holds without data."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from core.config import PlannerConfig
from core.cost.step_cost import StepCost
from core.errors import InvalidRequest
from core.fleet_control import FleetStatus, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner import shell
from fleet.planner.outlook import Outlook
from fleet.planner.planner import SHRINK_INTERVAL_S, PlanAction, Planner
from fleet.planner.prediction import FleetModel, WorkerModel
from fleet.planner.quiet_time import LEAST_S

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
COST = StepCost(step_s=0.006, sequence_s=0.0, context_s=5e-8, token_s=2e-5, pair_s=5e-10)  # about an H100 with 8 B
MODEL = WorkerModel(COST, step_limit_s=0.05, max_step_tokens=8192, pool_tokens=400_000)
START_S = 20.0


class PlannedFleet:
    """A fleet that does at once what the planner wants, under a traffic that the test sets."""

    def __init__(self, num_prefill: int, num_decode: int, can_switch: bool = True, **options: object) -> None:
        settings: dict[str, object] = {"enabled": True, "max_prefill": 8, "max_decode": 8, "start_s": START_S}
        self.planner = Planner(PlannerConfig(**(settings | options)), can_switch=can_switch)  # type: ignore[arg-type]
        self.sizes = {P: num_prefill, D: num_decode, R: 1}
        self.now = 1000.0
        self.rate, self.prompt, self.output = 0.0, 8000, 300
        self.num_waiting = self.num_open = 0
        self.totals = RequestTotals()
        self.measured: StepCost | None = COST
        self.limit_s = 0.05  # of a step
        self.held = dict.fromkeys(range(8), 0)  # tokens, by number of the slot
        self.machines: dict[str, str] = {}  # by slot; else each has its own
        self.states: dict[str, SlotState] = {}  # by slot; else it serves
        self.states_since = 0.0
        self.other_routers: tuple[str, ...] = ()  # which report nothing
        self.reasons: dict[str, str] = {}  # by slot, of leaving
        self.is_silent = self.rolling = False
        self.actions: list[tuple[float, PlanAction]] = []
        self._owed = 0.0

    def status(self) -> FleetStatus:
        slots = [
            SlotStatus(
                name, role, self.states.get(name, SlotState.SERVING), self.now - self.states_since,
                self.reasons.get(name, ""), service_id=name, machine=self.machines.get(name, f"machine of {name}"),
            )
            for role in (P, D)
            for name in (f"{role.value}-{number}" for number in range(self.sizes[role]))
        ]  # fmt: skip
        routers = ("router-0", *self.other_routers)
        slots += [SlotStatus(name, R, SlotState.SERVING, 1.0, service_id=name) for name in routers]
        return FleetStatus(dict(self.sizes), tuple(slots), rolling=self.rolling)

    def traffic(self) -> RouterTraffic:
        slots = [(slot.role, slot.name) for slot in self.status().slots if slot.role is not R]
        workers = tuple(
            WorkerTraffic(name, role, self.measured, self.limit_s, 8192, 400_000, self.held[int(name[-1])])
            for role, name in slots
        )
        return RouterTraffic(self.totals, self.num_waiting, self.num_open, 1.0, workers)

    def run(self, seconds: float, until_action: bool = False, **scene: object) -> list[PlanAction]:
        """The actions of these seconds, which the fleet takes. `scene`: attributes that change before."""
        for name, value in scene.items():
            setattr(self, name, value)
        seen: list[PlanAction] = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self._owed += self.rate
            count, self._owed = int(self._owed), self._owed % 1.0
            self.totals = self.totals.plus(
                RequestTotals(
                    count, count, count, count, self.prompt * count, self.prompt * count,
                    float(self.prompt) ** 2 * count, self.output * count, 0.3 * count,
                )
            )  # fmt: skip
            if not self.is_silent:
                self.planner.note("router-0", self.traffic(), self.now)
            for action in self.planner.plan(self.status(), self.now):
                self._take(action)
                seen.append(action)
            if seen and until_action:
                break
        return seen

    def _take(self, action: PlanAction) -> None:
        self.actions.append((self.now, action))
        if isinstance(action, ScaleTo):
            self.sizes |= action.sizes
        elif isinstance(action, SwitchRole):
            other = P if action.role is D else D
            self.sizes |= {action.role: self.sizes[action.role] + 1, other: self.sizes[other] - 1}

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes[P], self.sizes[D]

    @property
    def plan(self) -> str:
        return self.planner.status(self.now).plan


def messages(actions: list[PlanAction]) -> list[FleetMessage]:
    return [action for action in actions if isinstance(action, FleetMessage)]


def scales(actions: list[PlanAction]) -> list[ScaleTo]:
    return [action for action in actions if isinstance(action, ScaleTo)]


def test_a_step_of_the_traffic_brings_workers_within_seconds_with_the_reason() -> None:
    planned = PlannedFleet(1, 1)
    assert not planned.run(70, rate=2.0)
    before, planned.rate = planned.now, 12.0
    actions = planned.run(30, until_action=True)
    assert planned.now - before <= 15
    assert sum(planned.shape) > 2
    [message] = messages(actions)
    assert message.subject == "planner"
    assert "requests/s of 8000 + 300 tokens, 8000 not cached" in message.reason


def test_the_sizes_are_the_cheapest_that_hold_the_wanted_times() -> None:
    planned = PlannedFleet(1, 1)
    planned.run(200, rate=16.0)
    demand = planned.planner.log.demand(planned.now, START_S)
    assert demand is not None
    model = FleetModel(MODEL, MODEL)
    outlook = Outlook.of(model, demand, slo_ttft_s=1.0, slo_tpot_s=0.05, largest=(8, 8))
    assert outlook.holds(planned.shape)
    cheaper = [
        (prefill, decode)
        for prefill in range(9)
        for decode in range(1, 9)
        if prefill + decode < sum(planned.shape) - 1 and outlook.holds((prefill, decode))
    ]
    assert not cheaper


def test_a_decode_worker_costs_more_where_its_price_is_higher() -> None:
    shapes = []
    for price in (0.2, 5.0):
        planned = PlannedFleet(1, 1, decode_price=price)
        planned.run(30, rate=10.0)
        shapes.append(planned.shape)
    assert shapes[0][1] > shapes[1][1]


@pytest.mark.parametrize("start_s", [20.0, 200.0])
def test_pools_that_are_too_large_shrink_by_one_each_minute_after_a_quiet_time(start_s: float) -> None:
    planned, quiet_s = PlannedFleet(6, 6, start_s=start_s), max(LEAST_S, 2 * start_s)
    planned.run(quiet_s + 300, rate=2.0)
    changes = [at for at, action in planned.actions if isinstance(action, ScaleTo)]
    assert changes[0] - 1000.0 >= quiet_s
    assert {later - earlier for earlier, later in itertools.pairwise(changes)} == {SHRINK_INTERVAL_S}
    assert sum(planned.shape) == 12 - len(changes) <= 8


def test_traffic_that_swings_about_a_mean_does_not_move_the_pools_back_and_forth() -> None:
    planned = PlannedFleet(1, 1)
    for turn in range(16):
        planned.run(60, rate=8.0 + (1.0 if turn % 2 else -1.0))
    directions = [sum(action.sizes.values()) for _, action in planned.actions if isinstance(action, ScaleTo)]
    assert len(directions) <= 4


@pytest.mark.parametrize(
    ("scene", "switched"),
    [
        ({"held": dict.fromkeys(range(8), 500) | {3: 7}}, "decode-3"),  # it has the fewest bytes to move
        ({"reasons": {"decode-0": "its machine leaves"}}, "decode-1"),  # decode-0 is being replaced
        ({"states": {f"decode-{number}": SlotState.PLACING for number in (1, 2, 3)}}, None),  # the last one that serves
        ({}, None),  # without role switches it starts a worker
    ],
)
def test_a_worker_switches_its_role_before_another_one_starts(scene: dict[str, object], switched: str | None) -> None:
    planned = PlannedFleet(1, 4, can_switch=bool(scene), max_workers=5)
    # Steps of 9 ms leave little time for prompts.
    load: dict[str, object] = {"prompt": 20_000, "output": 40, "rate": 6.0, "limit_s": 0.009}
    actions = planned.run(60, until_action=True, **load, **scene)
    assert actions
    switches = [action for action in actions if isinstance(action, SwitchRole)]
    assert switches[:1] == ([SwitchRole(switched, P)] if switched else [])
    assert switched or scales(actions)[0].sizes[P] > 1


def test_no_data_is_not_zero_and_a_late_report_is_no_surge() -> None:
    planned = PlannedFleet(3, 3, idle_s=30.0, min_decode=0)
    assert not planned.run(300, is_silent=True)
    assert planned.plan == "holds its sizes: no router has reported"
    assert not planned.run(50, is_silent=False, measured=None, rate=5.0)
    assert planned.plan == "holds its sizes: too few requests have ended"
    planned.run(100, measured=COST)
    shape, planned.is_silent = planned.shape, True
    planned.run(400)
    assert planned.shape == shape
    assert "no router has reported" in planned.plan
    planned.run(100, is_silent=False)
    assert sum(planned.shape) <= sum(shape)
    assert planned.planner.log.level(planned.now) == pytest.approx(5.0, rel=0.1)


def test_a_fleet_that_cannot_follow_has_the_best_shape_of_its_bounds_and_says_so() -> None:
    planned = PlannedFleet(1, 1, max_workers=4)
    planned.run(300, rate=80.0)
    assert sum(planned.shape) == 4
    assert "no larger size is allowed" in planned.plan
    assert len([action for _, action in planned.actions if isinstance(action, ScaleTo | SwitchRole)]) <= 3
    for bounds, most in (({"max_workers": 3}, 3), ({"max_workers": 0, "max_prefill": 1, "max_decode": 1}, 2)):
        planned.planner.config = replace(planned.planner.config, **bounds)  # type: ignore[arg-type]
        planned.run(2)
        assert sum(planned.shape) <= most


def test_pinned_pools_stay_until_they_are_released() -> None:
    planned = PlannedFleet(1, 1)
    planned.planner.pin([P, R])
    planned.run(120, rate=12.0)
    assert planned.sizes[P] == 1
    assert planned.planner.status(planned.now).pinned == (P,)
    planned.planner.pin([], only=True)
    planned.run(30)
    assert not planned.planner.status(planned.now).pinned
    assert planned.planner.log.demand(planned.now, START_S) is not None


def test_an_idle_fleet_goes_to_zero_and_a_waiting_request_brings_it_back() -> None:
    planned = PlannedFleet(2, 2, idle_s=100.0, min_decode=0)
    planned.run(30, rate=3.0)
    planned.rate = 0.0
    shape = planned.shape
    planned.run(250, num_open=1)
    assert planned.sizes[D] >= 1, "a request is still open"
    planned.run(101, num_open=0)
    assert planned.shape == (0, 0)
    planned.run(500)
    assert planned.shape == (0, 0)
    assert planned.plan == "rests until a request comes"
    actions = planned.run(1, num_waiting=1)
    assert planned.sizes[D] >= 1
    assert sum(planned.shape) <= sum(shape)
    assert messages(actions)[0].reason == "1 requests wait"


def test_a_start_that_hangs_does_not_keep_the_pools_from_shrinking() -> None:
    planned = PlannedFleet(5, 5)
    planned.run(5, rate=1.0)
    planned.run(300, states={"prefill-4": SlotState.STARTING})
    assert sum(planned.shape) < 10


def start_one(planned: PlannedFleet, start_s: int) -> None:
    planned.states, planned.states_since = {"prefill-1": SlotState.PLACING}, planned.now
    planned.run(start_s)
    planned.states, planned.states_since = {}, planned.now
    planned.run(1)


def test_requests_that_wait_for_a_worker_allow_the_expected_start_after_a_quick_one_and_more_after_a_slow_one() -> None:
    planned = PlannedFleet(2, 2, min_decode=0)
    assert planned.planner.start_s == START_S
    start_one(planned, 2)
    assert (planned.planner.starts.longest(START_S), planned.planner.start_s) == (pytest.approx(2.0, abs=1.0), START_S)
    start_one(planned, 50)
    assert planned.planner.start_s == pytest.approx(50.0, abs=1.0)
    planned.planner.pin([D])
    assert planned.planner.start_s == 0.0, "the pool of an operator stays empty"


def test_those_leave_first_that_empty_a_machine_then_those_with_little_to_move() -> None:
    planned = PlannedFleet(0, 5)
    planned.machines = {"decode-0": "a", "decode-1": "a", "decode-2": "b", "decode-3": "c", "decode-4": "c"}
    actions = planned.run(200, until_action=True, held={0: 1, 1: 9, 2: 9, 3: 2, 4: 5, 5: 0, 6: 0, 7: 0}, rate=0.5)
    [scale] = scales(actions)
    assert scale.sizes == {D: 4}
    assert scale.first_to_leave == ("decode-2", "decode-0", "decode-3", "decode-4", "decode-1")


def test_a_decision_is_judged_later() -> None:
    planned = PlannedFleet(1, 1)
    planned.run(70, rate=2.0)
    planned.run(30, until_action=True, rate=12.0)
    planned.run(400)
    judged = [message for message in messages([action for _, action in planned.actions]) if "predicted" in message.what]
    assert judged
    assert "mean TTFT" in judged[0].reason
    assert ", was 0.3 s; " in judged[0].reason


def test_it_does_nothing_during_a_roll_or_when_it_is_off() -> None:
    planned = PlannedFleet(1, 1)
    assert not planned.run(200, rate=12.0, rolling=True)
    assert planned.plan == "holds its sizes during a roll"
    planned.rolling, planned.planner.config = False, replace(planned.planner.config, enabled=False)
    assert not planned.run(200)
    assert planned.plan == ""
    status = planned.planner.status(planned.now)
    assert (status.attainment, status.rate) == (1.0, pytest.approx(12.0, rel=0.01))


def test_traffic_that_is_rare_is_still_traffic() -> None:
    planned = PlannedFleet(4, 4)
    planned.run(30, rate=3.0)
    planned.rate = 0.02  # six requests in five minutes
    planned.run(1500)
    assert sum(planned.shape) <= 2


def test_a_pinned_prefill_pool_stays_while_the_fleet_rests_and_wakes() -> None:
    planned = PlannedFleet(2, 2, idle_s=100.0, min_decode=0)
    planned.planner.pin([P])
    planned.run(30, rate=3.0)
    planned.run(150, rate=0.0)
    assert planned.shape == (2, 0)
    planned.planner.pin([D])
    assert not planned.run(5, num_waiting=1)
    assert planned.plan == "holds its sizes: the decode pool is pinned at 0"
    planned.planner.pin([P], only=True)
    planned.run(1)
    assert planned.sizes[P] == 2
    assert planned.sizes[D] >= 1


async def test_the_fleet_may_refuse_a_plan_and_survives_a_bug_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[list[PlanAction]] = [[ScaleTo({D: 9})]]

    class Broken(Planner):
        def plan(self, status: FleetStatus, now: float) -> list[PlanAction]:
            if plans:
                return plans.pop()
            raise ZeroDivisionError(f"of a plan at {now:g} s for {len(status.slots)} slots")

    def refuse(_: ScaleTo | SwitchRole) -> None:
        raise InvalidRequest("decode", "at most 4")

    told: list[FleetMessage] = []
    planned = PlannedFleet(1, 1)
    monkeypatch.setattr(shell, "INTERVAL_S", 0.0)
    broken, now = Broken(planned.planner.config), lambda: planned.now
    await asyncio.wait_for(shell.run_planner(broken, dict, planned.status, now, refuse, told.append), 5.0)
    assert [(message.what, message.reason) for message in told] == [
        ("could not have its sizes", "decode: at most 4"),
        ("has a bug and stops; the sizes stay", "ZeroDivisionError: of a plan at 1000 s for 3 slots"),
    ]


def test_a_router_that_does_not_report_keeps_the_pools_from_shrinking() -> None:
    planned = PlannedFleet(4, 4)
    planned.run(30, rate=2.0)
    assert not planned.run(400, other_routers=("router-1",))
    planned.run(200, other_routers=())
    assert sum(planned.shape) < 8


def test_a_fleet_that_starts_is_not_idle_and_a_minimum_above_zero_fills_an_empty_pool() -> None:
    planned = PlannedFleet(1, 1, idle_s=20.0, min_decode=0)
    assert not planned.run(100, states={"decode-0": SlotState.STARTING})
    planned.run(2, states={})
    assert planned.shape == (0, 0)
    planned.planner.config = replace(planned.planner.config, min_decode=1)
    planned.run(1)
    assert planned.shape == (0, 1)


def test_the_queue_that_grows_while_workers_start_orders_no_more_of_them() -> None:
    planned = PlannedFleet(3, 3, start_s=60.0, max_prefill=16, max_decode=16)
    planned.held = dict.fromkeys(range(10), 0)
    planned.rate = 12.0
    planned.planner.pin([P, D])
    planned.run(200)
    planned.planner.pin([], only=True)
    new = {f"{role.value}-{number}" for role in (P, D) for number in range(3, 16)}
    planned.states, planned.states_since = dict.fromkeys(new, SlotState.STARTING), planned.now
    planned.rate = 36.0
    shapes = []
    for second in range(60):
        planned.num_waiting += 12
        planned.run(1)
        if second >= 10:
            shapes.append(planned.shape)
    assert sum(shapes[0]) > 12
    assert set(shapes) == {shapes[0]}


def test_a_fleet_that_can_work_off_no_backlog_still_takes_the_best_shape_for_the_rate() -> None:
    planned = PlannedFleet(1, 1, max_prefill=2)
    planned.planner.pin([D])
    planned.run(60, rate=30.0, num_waiting=1000)
    assert planned.shape == (2, 1)


def test_no_worker_switches_its_role_while_requests_wait() -> None:
    shapes = []
    for num_waiting in (0, 1):
        planned = PlannedFleet(1, 6)
        planned.run(60, until_action=True, num_waiting=num_waiting, prompt=20_000, output=40, limit_s=0.009, rate=4.0)
        shapes.append(planned.shape)
    assert shapes == [(3, 4), (2, 6)]


def test_traffic_that_falls_and_rises_again_and_again_keeps_its_workers_longer_each_time() -> None:
    planned = PlannedFleet(1, 1)
    kept_s = []
    for _ in range(4):
        planned.run(200, rate=20.0)
        begun, largest, planned.rate = planned.now, sum(planned.shape), 2.0
        while sum(planned.shape) == largest:
            planned.run(1)
        kept_s.append(planned.now - begun)
    assert kept_s[2] == kept_s[1] + LEAST_S  # the first time, no worker had to come back
    assert kept_s[3] == kept_s[1] + 3 * LEAST_S
