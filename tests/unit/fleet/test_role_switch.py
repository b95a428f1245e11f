"""FleetMachine switches the role of a worker: no other service starts or stops, and whatever interrupts the switch, the
fleet gets the sizes that are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from core.machine import Tick
from fleet.law.events import (
    Drained,
    DrainService,
    KillService,
    NewConfig,
    PublishFleet,
    RoleSwitched,
    ScaleTo,
    Shutdown,
    StartService,
    SwitchFailed,
    SwitchRole,
    SwitchService,
)
from fleet.law.machine import LAST_DRAIN_S, FleetMachine
from fleet.law.services import DRAIN_GRACE_S
from tests.unit.fleet.driving_fleet import D, Fleet, P


def switching(**options: object) -> Fleet:
    """decode-1 of two decode workers and one prefill worker becomes a prefill worker."""
    fleet = Fleet(num_decode=2, **options).all_started()
    fleet.send(SwitchRole("decode-1", P))
    return fleet


def roles(fleet: Fleet) -> dict[str, tuple[ServiceRole, bool]]:
    """The workers as the routers have last learned: role, and whether it drains."""
    (published,) = [action for action in fleet.actions if isinstance(action, PublishFleet)]
    return {serving.member.name: (serving.role, serving.draining) for serving in published.workers}


def test_a_switch_drains_then_serves_in_the_other_role_and_starts_nothing() -> None:
    fleet = switching()
    assert fleet.of(SwitchService) == [SwitchService(fleet.members["decode-1"], 30.0)]
    assert roles(fleet) == {"prefill-0": (P, False), "decode-0": (D, False), "decode-1": (D, True)}
    assert fleet.state_of("decode-1") == ("switching", "becomes a prefill worker")
    before = next(slot for slot in fleet.machine.status(fleet.now).slots if slot.name == "decode-1")
    fleet.send(RoleSwitched(fleet.members["decode-1"]))
    assert roles(fleet) == {"prefill-0": (P, False), "decode-0": (D, False), "decode-1": (P, False)}
    assert not fleet.of(StartService) + fleet.of(DrainService)
    slot = next(slot for slot in fleet.machine.status(fleet.now).slots if slot.name == "decode-1")
    assert (slot.role, slot.service_id, slot.reason) == (P, before.service_id, "")
    assert fleet.machine.wanted[P] == 2
    assert fleet.machine.wanted[D] == 1


def test_the_pools_scale_as_before_after_a_switch() -> None:
    fleet = switching()
    fleet.send(RoleSwitched(fleet.members["decode-1"]))
    fleet.send(ScaleTo({D: 2}))
    assert fleet.names(StartService) == ["decode-2"]
    fleet.send(ScaleTo({P: 1}))
    assert fleet.names(DrainService) == ["decode-1"], "the newest start of the pool"
    fleet.send(Drained(fleet.members["decode-1"]))
    fleet.send(ScaleTo({P: 2}))
    assert fleet.names(StartService) == ["prefill-1"]


def test_a_switched_worker_that_dies_starts_again_in_its_new_role() -> None:
    fleet = switching()
    fleet.send(RoleSwitched(fleet.members["decode-1"]))
    fleet.died("decode-1", after_s=1.0)
    fleet.send(Tick(), after_s=1.0)
    (start,) = fleet.of(StartService)
    assert (start.member.name, start.member.role) == ("decode-1", P)  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ["fails", "dies", "takes too long"])
def test_a_switch_that_fails_ends_with_a_start_in_the_new_role(end: str) -> None:
    fleet = switching()
    match end:
        case "fails":
            fleet.send(SwitchFailed(fleet.members["decode-1"], "still has work"))
        case "dies":
            fleet.died("decode-1")
        case _:
            assert not fleet.send(Tick(), after_s=30.0)
            fleet.send(Tick(), after_s=DRAIN_GRACE_S)
            assert fleet.names(KillService) == ["decode-1"]
    assert fleet.state_of("decode-1")[0] == "waiting"
    assert "decode-1" not in roles(fleet)
    fleet.send(Tick(), after_s=1.0)
    fleet.started("decode-1")
    assert roles(fleet)["decode-1"] == (P, False)


def test_scaling_down_the_pool_that_it_joins_ends_the_switch_and_the_worker_leaves() -> None:
    fleet = switching()
    fleet.send(ScaleTo({P: 1}))
    assert fleet.state_of("decode-1") == ("draining", "not wanted any more")
    assert fleet.send(RoleSwitched(fleet.members["decode-1"]))
    assert fleet.names(KillService) == ["decode-1"]
    assert roles(fleet) == {"prefill-0": (P, False), "decode-0": (D, False)}


@pytest.mark.parametrize("in_s", [None, 8.0])
def test_a_machine_that_leaves_ends_the_switch_and_a_worker_of_the_new_role_starts_elsewhere(
    in_s: float | None,
) -> None:
    fleet = Fleet(num_decode=2)
    for name in list(fleet.members):
        fleet.started(name, machine="m-1" if name == "decode-1" else "m-0")
    fleet.send(SwitchRole("decode-1", P))
    fleet.leaves("m-1", in_s)
    assert fleet.state_of("decode-1") == ("draining", "m-1.local leaves")
    assert fleet.names(StartService) == ["prefill-1"]
    assert not fleet.send(Tick(), after_s=7.5)
    fleet.send(Tick(), after_s=0.5)
    assert fleet.names(KillService) == ([] if in_s is None else ["decode-1"])


def test_a_roll_waits_for_the_end_of_a_switch_and_then_replaces_the_worker_too() -> None:
    fleet = switching()
    fleet.send(NewConfig(fleet.rules, restarts=True))
    assert not fleet.of(StartService)
    fleet.send(RoleSwitched(fleet.members["decode-1"]))
    for old, new in (("prefill-0", "prefill-1"), ("decode-1", "prefill-0"), ("decode-0", "decode-1")):
        assert fleet.names(StartService) == [new]
        fleet.started(new)
        assert fleet.names(DrainService) == [old]
        fleet.send(Drained(fleet.members[old]))


def test_a_shutdown_ends_a_switch_in_the_time_of_the_last_drains() -> None:
    fleet = switching()
    fleet.send(Shutdown())
    fleet.send(Drained(fleet.members["router-0"]))
    assert fleet.state_of("decode-1") == ("draining", "the fleet stops")
    fleet.send(Tick(), after_s=LAST_DRAIN_S + DRAIN_GRACE_S)
    assert "decode-1" in fleet.names(KillService)


@pytest.mark.parametrize(
    ("slot", "role", "reason"),
    [
        ("decode-9", P, "slot: 'decode-9' is no slot of this fleet; `tandem status` lists them"),
        ("decode-0", D, "role: decode-0 is a decode worker already"),
        ("router-0", D, "role: router-0 is a router and stays one"),
        ("decode-1", P, "slot: decode-1 does not serve, it is placing"),
    ],
)
def test_a_switch_out_of_place_is_refused(slot: str, role: ServiceRole, reason: str) -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({D: 2}))
    with pytest.raises(InvalidRequest) as refused:
        fleet.send(SwitchRole(slot, role))
    assert str(refused.value) == reason
    fleet.machine.check()


def test_a_switch_is_refused_beside_a_roll_a_replacement_a_shutdown_and_above_the_limit_of_a_pool() -> None:
    fleet = Fleet(num_prefill=4, num_decode=1).all_started()
    with pytest.raises(InvalidRequest, match=r"^prefill: must be in \[0, 4\] \(cluster.max_workers\), is 5"):
        fleet.send(SwitchRole("decode-0", P))
    fleet.leaves("m-0", None)
    with pytest.raises(InvalidRequest, match=r"decode-0 is being replaced: m-0\.local leaves"):
        fleet.send(SwitchRole("decode-0", P))
    for event, reason in ((NewConfig(fleet.rules, restarts=True), "the fleet rolls"), (Shutdown(), "the fleet stops")):
        fleet.send(event)
        with pytest.raises(InvalidRequest, match=reason):
            fleet.send(SwitchRole("prefill-0", D))


def test_the_option_that_keeps_workers_in_their_roles_is_named() -> None:
    fleet = Fleet().all_started()
    fleet.machine = FleetMachine(replace(fleet.rules, role_option="[engine] name = vllm"))
    fleet.send(Tick())
    fleet.all_started()
    with pytest.raises(InvalidRequest, match=r"^role: cannot change with \[engine\] name = vllm"):
        fleet.send(SwitchRole("decode-0", P))
