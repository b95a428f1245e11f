"""FleetMachine, one rule per test; tests/property/test_fleet.py checks every rule under random events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.errors import InvalidRequest
from core.fleet_control import SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.machine import Tick
from fleet.law.events import (
    Drained,
    DrainService,
    FleetFailed,
    FleetReady,
    FleetStopped,
    KillService,
    ScaleTo,
    ServiceStarted,
    Shutdown,
    StartFailed,
    StartService,
)
from fleet.law.machine import LAST_DRAIN_S
from fleet.law.services import DRAIN_GRACE_S, PLACING_NOTICE_S
from fleet.law.slots import BACKOFF_MAX_S, STABLE_S
from tests.unit.fleet.driving_fleet import D, Fleet, P, R


def test_workers_are_published_as_soon_as_the_router_serves() -> None:
    fleet = Fleet()
    fleet.started("prefill-0")
    assert fleet.published() is None
    fleet.started("router-0")
    assert fleet.published() == ["prefill-0"]
    fleet.started("decode-0")
    assert fleet.published() == ["prefill-0", "decode-0"]
    assert fleet.of(FleetReady)


def test_a_death_is_published_in_the_same_step_and_the_slot_restarts_after_a_pause() -> None:
    fleet = Fleet().all_started()
    fleet.died("decode-0")
    assert fleet.published() == ["prefill-0"]
    assert not fleet.of(StartService)
    assert fleet.machine.next_deadline() == fleet.now + 1.0
    first = fleet.members["decode-0"]
    fleet.send(Tick(), after_s=1.0)
    assert fleet.names(StartService) == ["decode-0"]
    assert fleet.members["decode-0"].start > first.start


def test_the_pause_doubles_up_to_a_limit_and_is_short_again_after_stable_service() -> None:
    fleet = Fleet().all_started()
    pauses = []
    for _ in range(7):
        fleet.died("decode-0")
        deadline = fleet.machine.next_deadline()
        assert deadline is not None
        pauses.append(deadline - fleet.now)
        fleet.send(Tick(), after_s=pauses[-1])
        fleet.started("decode-0")
    assert pauses == [1, 2, 4, 8, 16, BACKOFF_MAX_S, BACKOFF_MAX_S]
    fleet.died("decode-0", after_s=STABLE_S)
    assert fleet.machine.next_deadline() == fleet.now + 1.0


def test_growing_starts_workers_and_shrinking_drains_the_newest_first() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({P: 3}))
    assert fleet.names(StartService) == ["prefill-1", "prefill-2"]
    assert fleet.machine.wanted == {P: 3, D: 1, R: 1}
    fleet.started("prefill-2")
    fleet.started("prefill-1")
    fleet.send(ScaleTo({P: 1}))
    assert sorted(fleet.names(DrainService)) == ["prefill-1", "prefill-2"]
    assert fleet.published() == ["prefill-0", "decode-0", "prefill-1", "prefill-2"], "a draining worker has left"
    assert fleet.published_as_draining() == ["prefill-1", "prefill-2"]
    fleet.send(Drained(fleet.members["prefill-1"]))
    assert fleet.printed() == ["prefill-1 has drained"]
    assert fleet.published() == ["prefill-0", "decode-0", "prefill-2"]


@pytest.mark.parametrize(
    ("happens", "killed"),
    [
        (lambda fleet: fleet.started("decode-2"), ["decode-1"]),  # a worker that starts, before one that serves
        (lambda fleet: fleet.placed("decode-2"), ["decode-1"]),  # one without a machine, before one that starts
        (lambda fleet: fleet.died("decode-1"), []),  # a slot that waits, before a worker that starts
    ],
)
def test_shrinking_removes_the_slot_that_is_farthest_from_serving(
    happens: Callable[[Fleet], object], killed: list[str]
) -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({D: 3}))
    happens(fleet)
    fleet.send(ScaleTo({D: 2}))
    assert (fleet.names(KillService), fleet.of(DrainService)) == (killed, [])
    assert list(fleet.revisions()) == ["router-0", "prefill-0", "decode-0", "decode-2"]


def test_a_pool_may_be_empty_and_grow_again() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({P: 0}))
    assert fleet.names(DrainService) == ["prefill-0"]
    fleet.send(ScaleTo({P: 1}))
    assert fleet.names(StartService) == ["prefill-1"], "the slot of a draining worker was reused"


def test_a_drain_past_its_time_limit_ends_in_a_kill() -> None:
    fleet = Fleet(num_prefill=2).all_started()
    fleet.send(ScaleTo({P: 1}))
    assert not fleet.send(Tick(), after_s=30.0)
    fleet.send(Tick(), after_s=DRAIN_GRACE_S)
    assert fleet.names(KillService) == ["prefill-1"]
    assert fleet.published() == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({P: 5}, "prefill: must be in [0, 4] (cluster.max_workers), is 5"),
        ({P: 2, D: -1}, "decode: must be in [0, 4] (cluster.max_workers), is -1"),
        ({R: 0}, "routers: must be in [1, 4] (cluster.max_workers), is 0"),
        ({P: 2, R: 5}, "routers: must be in [1, 4] (cluster.max_workers), is 5"),
    ],
)
def test_a_size_out_of_range_is_refused_and_changes_nothing(sizes: dict[ServiceRole, int], error: str) -> None:
    fleet = Fleet().all_started()
    with pytest.raises(InvalidRequest) as refused:
        fleet.send(ScaleTo(sizes))
    assert str(refused.value) == error
    assert fleet.machine.wanted == {P: 1, D: 1, R: 1}
    assert fleet.send(Tick()) == []


@pytest.mark.parametrize("has_served", [False, True])
def test_a_start_that_cannot_succeed_fails_the_fleet_once_and_only_before_it_has_served(has_served: bool) -> None:
    """A start without an answer is killed, and counts as such a start."""
    fleet = Fleet().all_started() if has_served else Fleet()
    fleet.send(ScaleTo({D: 3}))
    reasons = {"decode-1": "no such model", "decode-2": "no answer within 50 s (cluster.start_timeout_s)"}
    for name, reason in reasons.items():
        fleet.placed(name)
        if name == "decode-1":
            fleet.send(StartFailed(fleet.members[name], reason, permanent=True))
        else:
            fleet.send(Tick(), after_s=50.0)
            assert fleet.names(KillService) == [name]
        fails = name == "decode-1" and not has_served
        assert fleet.of(FleetFailed) == ([FleetFailed(f"{name}: {reason}")] if fails else [])
        assert fails or f"{name} did not start: {reason}; starting it again in 1 s" in fleet.printed()


def test_before_the_fleet_has_served_a_start_is_attempted_a_limited_number_of_times() -> None:
    fleet = Fleet()
    for pause_s in (1.0, 2.0):
        fleet.placed("decode-0")
        fleet.send(StartFailed(fleet.members["decode-0"], "out of memory", permanent=False))
        assert fleet.printed()
        fleet.send(Tick(), after_s=pause_s)
    fleet.died("decode-0")
    assert [str(action) for action in fleet.of(FleetFailed)] == ["FleetFailed(reason='decode-0: killed')"]


def test_one_death_before_the_fleet_has_served_does_not_fail_it() -> None:
    fleet = Fleet()
    fleet.died("decode-0")
    assert fleet.printed() == ["decode-0 died: killed; starting it again in 1 s"]
    assert not fleet.of(FleetFailed)


def test_a_fleet_that_has_served_reports_each_start_and_each_drain() -> None:
    fleet = Fleet()
    fleet.all_started()
    assert fleet.printed() == []
    fleet.died("decode-0")
    fleet.send(Tick(), after_s=1.0)
    fleet.started("decode-0")
    assert fleet.printed() == ["decode-0 serves"]


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        (D, {}, "Ray has not placed it yet"),
        (D, {"address": "head:6379"}, "no machine has a free 'decode'"),
        (R, {"address": "head:6379"}, "Ray has not placed it yet"),
        (R, {"address": "head:6379", "router_resource": "edge"}, "no machine has a free 'edge'"),
    ],
)
def test_a_worker_that_waits_for_a_machine_says_why_once_and_is_never_killed_for_it(
    role: ServiceRole, options: dict[str, str], reason: str
) -> None:
    fleet = Fleet(**options).all_started()
    fleet.send(ScaleTo({role: 2}))
    name = f"{role.value}-1"
    assert fleet.state_of(name) == ("placing", reason)
    fleet.send(Tick(), after_s=PLACING_NOTICE_S)
    assert fleet.printed() == [f"{name} waits for a machine: {reason}"]
    assert fleet.send(Tick(), after_s=1e6) == []
    fleet.placed(name)
    assert fleet.state_of(name) == ("starting", "")
    assert fleet.machine.next_deadline() == fleet.now + 50.0, "the time limit begins on the machine"


def test_the_status_of_a_fleet_lists_every_slot_with_its_state_and_machine() -> None:
    fleet = Fleet(num_prefill=2)
    fleet.placed("prefill-1", "m-7")
    fleet.send(ServiceStarted(fleet.members["prefill-1"], "prefill-1.ab", "host:1", "1.2.3"), after_s=2.0)
    status = fleet.machine.status(fleet.now + 3.0)
    assert status.wanted == {P: 2, D: 1, R: 1}
    assert [slot.name for slot in status.slots] == ["router-0", "prefill-0", "prefill-1", "decode-0"]
    assert status.slots[2] == SlotStatus(
        "prefill-1", P, SlotState.SERVING, 3.0, "", "prefill-1.ab", "m-7.local", "1.2.3", revision=1
    )


def test_at_shutdown_every_router_drains_before_any_worker() -> None:
    fleet = Fleet(num_routers=2).all_started()
    fleet.send(Shutdown())
    assert sorted(fleet.names(DrainService)) == ["router-0", "router-1"]
    fleet.send(Drained(fleet.members["router-1"]))
    assert not fleet.of(DrainService)
    fleet.died("router-0")
    assert sorted(fleet.names(DrainService)) == ["decode-0", "prefill-0"]


def test_at_shutdown_no_service_restarts() -> None:
    fleet = Fleet().all_started()
    fleet.died("decode-0")
    fleet.send(Shutdown())
    fleet.send(Tick(), after_s=1.0)
    assert not fleet.of(StartService)
    fleet.died("router-0")
    assert fleet.names(DrainService) == ["prefill-0"]


def test_at_shutdown_an_already_draining_worker_gets_the_short_time_limit_too() -> None:
    fleet = Fleet(num_prefill=2).all_started()
    fleet.send(ScaleTo({P: 1}))
    fleet.send(Shutdown())
    fleet.send(Drained(fleet.members["router-0"]))
    assert not fleet.of(KillService)
    last_s = LAST_DRAIN_S + DRAIN_GRACE_S
    fleet.send(Tick(), after_s=0.9 * last_s)
    assert not fleet.of(KillService)
    fleet.send(Tick(), after_s=0.1 * last_s + 0.001)
    assert sorted(fleet.names(KillService)) == ["decode-0", "prefill-0", "prefill-1"]
    assert fleet.of(FleetStopped)
    assert fleet.send(Tick()) == [], "FleetStopped was sent again"


DRAIN_S = 30.0  # of a worker


def fleet_on_two_machines() -> Fleet:
    """The decode workers are on m-1 and m-2."""
    fleet = Fleet(num_decode=2)
    for name, machine in (("router-0", "m-0"), ("prefill-0", "m-0"), ("decode-0", "m-1"), ("decode-1", "m-2")):
        fleet.started(name, machine=machine)
    return fleet


def draining(fleet: Fleet) -> list[tuple[str, float]]:
    return [(action.member.name, action.timeout_s) for action in fleet.of(DrainService)]  # type: ignore[union-attr]


def test_a_worker_of_a_leaving_machine_drains_when_its_replacement_serves() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    assert fleet.names(StartService) == ["decode-2"]
    assert fleet.printed() == ["decode-0 is replaced by decode-2: m-1.local leaves"]
    assert fleet.state_of("decode-0") == ("serving", "m-1.local leaves")
    assert fleet.published() is None, "the worker still serves"
    fleet.started("decode-2", machine="m-2")
    assert draining(fleet) == [("decode-0", DRAIN_S)]
    fleet.send(Drained(fleet.members["decode-0"]))
    assert fleet.published() == ["prefill-0", "decode-1", "decode-2"]
    assert not fleet.of(StartService)


@pytest.mark.parametrize(
    ("in_s", "drains_after_s", "drains_for_s"),
    [(100.0, 100.0 - DRAIN_S - DRAIN_GRACE_S, DRAIN_S), (12.0, 0.0, 12.0 - DRAIN_GRACE_S), (1.0, 0.0, 0.0),
     (None, 50.0, DRAIN_S)],
)  # fmt: skip
def test_without_room_elsewhere_a_worker_drains_while_its_machine_still_lives(
    in_s: float | None, drains_after_s: float, drains_for_s: float
) -> None:
    """Without an end of the machine, its services wait as long as a start may take."""
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s)
    if drains_after_s:
        assert not draining(fleet)
        fleet.send(Tick(), after_s=drains_after_s - 0.1)
        assert not draining(fleet)
        fleet.send(Tick(), after_s=0.1)
    assert [(name, pytest.approx(timeout_s)) for name, timeout_s in draining(fleet)] == [("decode-0", drains_for_s)]
    assert fleet.state_of("decode-2")[0] == "placing", "the replacement goes on waiting for a machine"
    fleet.send(Drained(fleet.members["decode-0"]))
    assert not fleet.of(StartService)
    fleet.started("decode-2")
    assert fleet.published() == ["prefill-0", "decode-1", "decode-2"]


def test_every_role_of_a_leaving_machine_is_replaced() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-0", in_s=100.0)
    assert sorted(fleet.names(StartService)) == ["prefill-1", "router-1"]


def test_a_machine_that_leaves_twice_is_replaced_once() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    assert fleet.leaves("m-1", in_s=90.0) == []


def test_a_service_that_starts_on_a_leaving_machine_starts_again_elsewhere_at_once() -> None:
    fleet = fleet_on_two_machines()
    fleet.send(ScaleTo({D: 3}))
    fleet.placed("decode-2", machine="m-3")
    first = fleet.members["decode-2"]
    fleet.leaves("m-3", in_s=100.0)
    assert fleet.of(KillService) == [KillService(first)]
    assert fleet.names(StartService) == ["decode-2"]


def test_a_replacement_takes_the_place_of_a_worker_that_dies_before_it_serves() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    fleet.died("decode-0")
    assert fleet.printed() == ["decode-0 died: killed; decode-2 takes its place"]
    fleet.started("decode-2")
    assert fleet.published() == ["prefill-0", "decode-1", "decode-2"]
    assert not fleet.of(DrainService)


def test_a_replacement_that_fails_starts_again_and_the_worker_serves_on() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    fleet.died("decode-2")
    fleet.send(Tick(), after_s=1.0)
    assert fleet.names(StartService) == ["decode-2"]
    fleet.started("decode-2")
    assert draining(fleet) == [("decode-0", DRAIN_S)]


def test_a_pool_that_shrinks_gives_up_the_leaving_worker_and_its_replacement() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    fleet.send(ScaleTo({D: 1}))
    assert fleet.names(KillService) == ["decode-2"]
    assert draining(fleet) == [("decode-0", DRAIN_S)]


def test_a_replacement_on_a_machine_that_leaves_too_is_replaced_in_turn() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    fleet.started("decode-2", machine="m-3")
    fleet.leaves("m-3", in_s=100.0)
    assert fleet.names(StartService) == ["decode-3"]


def test_at_shutdown_a_leaving_worker_drains_last_and_no_replacement_is_left() -> None:
    fleet = fleet_on_two_machines()
    fleet.leaves("m-1", in_s=100.0)
    fleet.send(Shutdown())
    assert fleet.names(KillService) == ["decode-2"]
    fleet.send(Drained(fleet.members["router-0"]))
    assert sorted(fleet.names(DrainService)) == ["decode-0", "decode-1", "prefill-0"]
    assert fleet.leaves("m-2", in_s=5.0) == []
    assert fleet.machine.wanted == {P: 1, D: 2, R: 1}
