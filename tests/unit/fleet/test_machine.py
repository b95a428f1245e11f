"""The fleet's machine, one rule a test; tests/property/test_fleet.py has all of them under random events."""

from __future__ import annotations

import pytest

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from core.machine import Tick
from fleet.events import (
    Drained,
    DrainService,
    FleetAction,
    FleetFailed,
    FleetReady,
    FleetStopped,
    KillService,
    Member,
    Notice,
    PublishFleet,
    ScaleTo,
    ServiceDied,
    ServiceStarted,
    Shutdown,
    StartFailed,
    StartService,
)
from fleet.machine import BACKOFF_MAX_S, DRAIN_GRACE_S, LAST_DRAIN_S, STABLE_S, FleetMachine

P, D = ServiceRole.PREFILL, ServiceRole.DECODE


class Fleet:
    """A machine, a clock, and what it has asked for so far."""

    def __init__(self, **options: object) -> None:
        config = ClusterConfig(max_workers=4, start_timeout_s=50.0, restart_backoff_s=1.0, **options)  # type: ignore[arg-type]
        self.machine = FleetMachine(config, drain_timeout_s=30.0, router_drain_timeout_s=10.0)
        self.now = 100.0
        self.members: dict[str, Member] = {}
        self.send(Tick())

    def send(self, event: object, after_s: float = 0.0) -> list[FleetAction]:
        self.now += after_s
        self.actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        self.machine.check()
        for action in self.actions:
            if isinstance(action, StartService):
                self.members[action.member.name] = action.member
        return self.actions

    def started(self, name: str, address: str = "") -> list[FleetAction]:
        member = self.members[name]
        return self.send(ServiceStarted(member, f"{name}-{member.start:x}", address or f"host:{member.start}"))

    def died(self, name: str, after_s: float = 0.0) -> list[FleetAction]:
        return self.send(ServiceDied(self.members[name], "killed"), after_s)

    def all_started(self) -> Fleet:
        for name in list(self.members):
            self.started(name)
        return self

    def of(self, kind: type) -> list[FleetAction]:
        return [action for action in self.actions if isinstance(action, kind)]

    def names(self, kind: type) -> list[str]:
        return [action.member.name for action in self.of(kind)]  # type: ignore[union-attr]

    def published(self) -> list[str] | None:
        news = self.of(PublishFleet)
        return [serving.member.name for serving in news[-1].workers] if news else None  # type: ignore[union-attr]


def test_the_first_tick_starts_the_router_and_both_pools() -> None:
    fleet = Fleet(num_prefill=2, num_decode=1)
    assert sorted(fleet.names(StartService)) == ["decode-0", "prefill-0", "prefill-1", "router-0"]


def test_workers_are_published_once_there_is_a_router_to_tell() -> None:
    fleet = Fleet()
    fleet.started("prefill-0")
    assert fleet.published() is None
    fleet.started("router-0")
    assert fleet.published() == ["prefill-0"]
    fleet.started("decode-0")
    assert fleet.published() == ["prefill-0", "decode-0"]
    assert fleet.of(FleetReady)


def test_a_death_is_published_in_the_same_step_and_the_slot_starts_again_after_its_pause() -> None:
    fleet = Fleet().all_started()
    fleet.died("decode-0")
    assert fleet.published() == ["prefill-0"]
    assert not fleet.of(StartService)
    assert fleet.machine.next_deadline() == fleet.now + 1.0
    first = fleet.members["decode-0"]
    fleet.send(Tick(), after_s=1.0)
    assert fleet.names(StartService) == ["decode-0"]
    assert fleet.members["decode-0"].start > first.start


def test_the_pause_doubles_up_to_its_bound_and_is_forgotten_after_a_stable_while() -> None:
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


def test_the_router_comes_back_at_its_address_and_is_told_of_every_worker() -> None:
    fleet = Fleet().all_started()
    address = "here:50051"
    fleet.died("router-0")
    fleet.send(Tick(), after_s=1.0)
    fleet.started("router-0", address)
    fleet.died("router-0")
    fleet.send(Tick(), after_s=2.0)
    restart = fleet.of(StartService)[0]
    assert isinstance(restart, StartService)
    assert restart.address == address
    fleet.started("router-0", address)
    assert fleet.published() == ["prefill-0", "decode-0"]


def test_what_an_older_start_still_says_is_dropped() -> None:
    fleet = Fleet().all_started()
    old = fleet.members["decode-0"]
    fleet.died("decode-0")
    assert fleet.send(ServiceDied(old, "again")) == []
    fleet.send(Tick(), after_s=1.0)
    assert fleet.send(ServiceStarted(old, "old", "old:1")) == []


def test_growing_starts_workers_and_shrinking_drains_the_newest_first() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo(3, None))
    assert fleet.names(StartService) == ["prefill-1", "prefill-2"]
    assert fleet.machine.wanted == (3, 1)
    fleet.started("prefill-2")
    fleet.started("prefill-1")
    fleet.send(ScaleTo(1, None))
    assert sorted(fleet.names(DrainService)) == ["prefill-1", "prefill-2"]
    assert fleet.published() is None, "a draining worker stays known to the router until it is done"
    fleet.send(Drained(fleet.members["prefill-1"]))
    assert fleet.published() == ["prefill-0", "decode-0", "prefill-2"]


def test_shrinking_first_gives_up_what_does_not_serve_yet() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo(None, 3))
    fleet.started("decode-2")
    fleet.send(ScaleTo(None, 2))
    assert fleet.names(KillService) == ["decode-1"]
    assert not fleet.of(DrainService)


def test_shrinking_gives_up_what_waits_for_its_next_start_before_what_is_starting() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo(None, 3))
    fleet.died("decode-1")
    fleet.send(ScaleTo(None, 2))
    assert not fleet.of(KillService)
    fleet.started("decode-2")
    assert fleet.published() == ["prefill-0", "decode-0", "decode-2"]


def test_a_pool_may_be_empty_and_come_back() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo(0, None))
    assert fleet.names(DrainService) == ["prefill-0"]
    fleet.send(ScaleTo(1, None))
    assert fleet.names(StartService) == ["prefill-1"], "the place of a draining worker is not taken"


def test_a_drain_that_takes_too_long_ends_in_a_kill() -> None:
    fleet = Fleet(num_prefill=2).all_started()
    fleet.send(ScaleTo(1, None))
    fleet.send(Tick(), after_s=30.0 + DRAIN_GRACE_S)
    assert fleet.names(KillService) == ["prefill-1"]
    assert fleet.published() == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(("prefill", "decode", "field"), [(5, None, "prefill"), (2, -1, "decode")])
def test_a_size_out_of_bounds_is_refused_and_changes_nothing(prefill: int, decode: int | None, field: str) -> None:
    fleet = Fleet().all_started()
    with pytest.raises(InvalidRequest) as refused:
        fleet.send(ScaleTo(prefill, decode))
    assert refused.value.field == field
    assert fleet.machine.wanted == (1, 1)
    assert fleet.send(Tick()) == []


def test_a_start_that_cannot_succeed_fails_the_fleet_once_before_it_has_served() -> None:
    fleet = Fleet()
    for name in ("decode-0", "prefill-0"):
        fleet.send(StartFailed(fleet.members[name], "no such model", permanent=True))
        assert bool(fleet.of(FleetFailed)) == (name == "decode-0")


def test_the_first_start_is_tried_a_bounded_number_of_times() -> None:
    fleet = Fleet()
    for pause_s in (1.0, 2.0):
        fleet.send(StartFailed(fleet.members["decode-0"], "out of memory", permanent=False))
        assert fleet.of(Notice)
        fleet.send(Tick(), after_s=pause_s)
    fleet.died("decode-0")
    assert [str(action) for action in fleet.of(FleetFailed)] == ["FleetFailed(reason='decode-0: killed')"]


def test_a_death_before_the_fleet_has_served_is_no_reason_to_give_up() -> None:
    fleet = Fleet()
    fleet.died("decode-0")
    assert fleet.of(Notice) == [Notice("decode-0 died: killed; starting it again in 1 s")]
    assert not fleet.of(FleetFailed)


def test_a_fleet_that_has_served_keeps_trying_whatever_the_reason() -> None:
    fleet = Fleet().all_started()
    fleet.died("decode-0")
    fleet.send(Tick(), after_s=1.0)
    fleet.send(StartFailed(fleet.members["decode-0"], "no such model", permanent=True))
    assert not fleet.of(FleetFailed)
    fleet.send(Tick(), after_s=2.0)
    assert fleet.names(StartService) == ["decode-0"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "no answer within 50 s; starting it again in 1 s"),
        ("head:6379", "no answer within 50 s (no machine with a free 'decode'?); starting it again in 1 s"),
    ],
)
def test_a_start_nobody_hears_of_is_killed_and_tried_again(address: str, says: str) -> None:
    fleet = Fleet(address=address).all_started()
    fleet.send(ScaleTo(None, 2))
    fleet.send(Tick(), after_s=50.0)
    assert fleet.names(KillService) == ["decode-1"]
    assert fleet.of(Notice) == [Notice(f"decode-1 did not start: {says}")]


def test_at_the_end_the_router_drains_before_any_worker() -> None:
    fleet = Fleet().all_started()
    fleet.send(Shutdown())
    assert fleet.names(DrainService) == ["router-0"]
    fleet.send(Drained(fleet.members["router-0"]))
    assert sorted(fleet.names(DrainService)) == ["decode-0", "prefill-0"]
    fleet.send(Drained(fleet.members["decode-0"]))
    fleet.died("prefill-0")
    assert fleet.of(FleetStopped)


def test_at_the_end_nothing_is_started_again() -> None:
    fleet = Fleet().all_started()
    fleet.died("decode-0")
    fleet.send(Shutdown())
    fleet.send(Tick(), after_s=1.0)
    assert not fleet.of(StartService)
    fleet.died("router-0")
    assert fleet.names(DrainService) == ["prefill-0"]


def test_at_the_end_a_worker_that_drains_already_has_as_little_time_as_the_others() -> None:
    fleet = Fleet(num_prefill=2).all_started()
    fleet.send(ScaleTo(1, None))
    fleet.send(Shutdown())
    fleet.send(Drained(fleet.members["router-0"]))
    assert not fleet.of(KillService)
    last_s = LAST_DRAIN_S + DRAIN_GRACE_S
    fleet.send(Tick(), after_s=0.9 * last_s)
    assert not fleet.of(KillService)
    fleet.send(Tick(), after_s=0.1 * last_s + 0.001)
    assert sorted(fleet.names(KillService)) == ["decode-0", "prefill-0", "prefill-1"]
    assert fleet.of(FleetStopped)
    assert fleet.send(Tick()) == [], "it has stopped, once"
