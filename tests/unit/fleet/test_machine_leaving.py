"""FleetMachine replaces the services of a machine that leaves."""

from __future__ import annotations

import pytest

from core.machine import Tick
from fleet.law.events import Drained, DrainService, KillService, ScaleTo, Shutdown, StartService
from fleet.law.services import DRAIN_GRACE_S
from tests.unit.fleet.driving_fleet import D, Fleet, P, R

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
