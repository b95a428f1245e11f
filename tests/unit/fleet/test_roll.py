"""FleetMachine gives services another config: by a roll, or while they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.machine import Tick
from fleet.law.claims import Claims
from fleet.law.events import (
    ConfigureService,
    Drained,
    DrainService,
    KillService,
    NewConfig,
    ScaleTo,
    ServiceConfigured,
    ServiceStarted,
    Shutdown,
    StartFailed,
    StartService,
    StopRoll,
)
from fleet.law.rollout import ROLL_PLACE_S
from tests.unit.fleet.driving_fleet import D, Fleet, P


def rolling(fleet: Fleet) -> Fleet:
    fleet.send(NewConfig(fleet.rules, restarts=True))
    return fleet


def replaced(fleet: Fleet, old: str, new: str) -> None:
    """One step of a roll with room for both."""
    assert fleet.names(StartService) == [new]
    assert not fleet.of(DrainService), "the old one serves until the new one does"
    fleet.started(new)
    assert fleet.names(DrainService) == [old]
    assert not fleet.of(StartService), "one at a time"
    fleet.send(Drained(fleet.members[old]))


def test_a_roll_replaces_one_service_at_a_time_new_before_old_and_routers_last() -> None:
    fleet = rolling(Fleet(num_prefill=2, num_routers=2).all_started())
    assert fleet.printed()[0] == "fleet rolls to config 2"
    replaced(fleet, "prefill-0", "prefill-2")
    replaced(fleet, "prefill-1", "prefill-0")
    replaced(fleet, "decode-0", "decode-1")
    replaced(fleet, "router-0", "router-2")
    assert fleet.machine.status(fleet.now).rolling
    replaced(fleet, "router-1", "router-0")
    assert "fleet has rolled: every service has config 2" in fleet.printed()
    assert set(fleet.revisions().values()) == {2}
    status = fleet.machine.status(fleet.now)
    assert (status.revision, status.rolling) == (2, False)


def test_each_start_names_its_config_and_the_service_that_it_replaces() -> None:
    fleet = Fleet().all_started()
    old = fleet.members["prefill-0"]
    rolling(fleet)
    assert fleet.of(StartService) == [StartService(fleet.members["prefill-1"], 2, old)]
    fleet.send(ScaleTo({D: 2}))
    assert fleet.of(StartService) == [StartService(fleet.members["decode-1"], 2)], "a new slot has the new config too"


def test_without_room_for_both_the_old_service_drains_first() -> None:
    fleet = rolling(Fleet().all_started())
    fleet.send(Tick(), after_s=ROLL_PLACE_S)
    assert fleet.names(DrainService) == ["prefill-0"]
    fleet.send(Drained(fleet.members["prefill-0"]))
    assert not fleet.of(StartService), "the next one waits until this one serves"
    fleet.started("prefill-1")
    assert fleet.names(StartService) == ["decode-1"]


def test_a_new_service_with_a_machine_may_take_its_time() -> None:
    fleet = rolling(Fleet().all_started())
    fleet.placed("prefill-1")
    assert fleet.send(Tick(), after_s=ROLL_PLACE_S + 1.0) == []


def failed(fleet: Fleet, name: str) -> None:
    fleet.placed(name)
    fleet.send(StartFailed(fleet.members[name], "no such model", permanent=True))


def test_a_failed_start_ends_the_roll_and_what_has_rolled_gets_its_old_config_again() -> None:
    fleet = rolling(Fleet().all_started())
    replaced(fleet, "prefill-0", "prefill-1")
    failed(fleet, "decode-1")
    assert "fleet restores config 1: decode-1 did not start: no such model" in fleet.printed()
    assert fleet.state_of("decode-0") == ("serving", "")
    replaced(fleet, "prefill-1", "prefill-0")
    assert fleet.printed()[-1] == "fleet has rolled: every service has config 1"
    assert fleet.revisions() == {"router-0": 1, "prefill-0": 1, "decode-0": 1}
    assert not fleet.of(StartService)


def test_a_rolled_service_that_dies_during_the_roll_ends_it_and_starts_again_with_the_old_config() -> None:
    fleet = rolling(Fleet().all_started())
    replaced(fleet, "prefill-0", "prefill-1")
    fleet.died("prefill-1")
    assert "fleet restores config 1: prefill-1 died: killed" in fleet.printed()
    assert fleet.names(KillService) == ["decode-1"], "its replacement was on the way"
    fleet.send(Tick(), after_s=1.0)
    assert fleet.of(StartService) == [StartService(fleet.members["prefill-1"], 1)]


def test_a_service_of_the_old_config_may_die_during_a_roll() -> None:
    fleet = rolling(Fleet(num_decode=2).all_started())
    fleet.died("decode-0")
    assert fleet.machine.status(fleet.now).revision == 2
    fleet.send(Tick(), after_s=1.0)
    assert fleet.of(StartService) == [StartService(fleet.members["decode-0"], 2)]


def test_without_room_a_failed_start_gives_the_slot_its_old_config_again() -> None:
    fleet = rolling(Fleet().all_started())
    fleet.send(Tick(), after_s=ROLL_PLACE_S)
    fleet.send(Drained(fleet.members["prefill-0"]))
    failed(fleet, "prefill-1")
    fleet.send(Tick(), after_s=1.0)
    assert fleet.of(StartService) == [StartService(fleet.members["prefill-1"], 1)]
    fleet.started("prefill-1")
    assert not fleet.machine.status(fleet.now).rolling


def test_a_failure_while_the_old_config_is_restored_is_a_failure_like_any_other() -> None:
    fleet = rolling(Fleet().all_started())
    replaced(fleet, "prefill-0", "prefill-1")
    failed(fleet, "decode-1")
    failed(fleet, "prefill-0")
    assert fleet.printed()[-1] == "prefill-0 did not start: no such model; starting it again in 1 s"
    fleet.send(Tick(), after_s=1.0)
    replaced(fleet, "prefill-1", "prefill-0")
    assert not fleet.machine.status(fleet.now).rolling


def test_two_starts_that_are_too_slow_at_once_end_the_roll_once() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({D: 2}))
    rolling(fleet)
    fleet.send(Tick())
    for name in ("decode-1", "prefill-1"):
        fleet.placed(name)
    fleet.send(Tick(), after_s=50.0)
    assert sorted(fleet.names(KillService)) == ["decode-1", "prefill-1"]
    assert [line for line in fleet.printed() if "restores" in line] == [
        "fleet restores config 1: decode-1 did not start: no answer within 50 s (cluster.start_timeout_s)"
    ]


def test_an_operator_may_stop_a_roll() -> None:
    fleet = rolling(Fleet().all_started())
    fleet.send(StopRoll())
    assert fleet.names(KillService) == ["prefill-1"]
    assert fleet.revisions() == {"router-0": 1, "prefill-0": 1, "decode-0": 1}
    assert not fleet.machine.status(fleet.now).rolling
    with pytest.raises(InvalidRequest, match="roll: no roll that could be stopped"):
        fleet.send(StopRoll())


def test_services_without_a_machine_get_the_new_config_first_and_hold_up_nothing() -> None:
    fleet = Fleet().all_started()
    fleet.send(ScaleTo({D: 2}))
    old = fleet.members["decode-1"]
    rolling(fleet)
    assert fleet.of(KillService) == [KillService(old)]
    assert fleet.of(StartService) == [StartService(fleet.members["decode-1"], 2)]
    fleet.send(Tick())
    assert fleet.names(StartService) == ["prefill-1"]


@pytest.mark.parametrize("restarts", [True, False])
def test_a_second_config_waits_for_the_end_of_a_roll_and_none_comes_to_a_fleet_that_stops(restarts: bool) -> None:
    fleet = rolling(Fleet().all_started())
    with pytest.raises(InvalidRequest, match="config: the fleet rolls already"):
        fleet.send(NewConfig(fleet.rules, restarts))
    fleet.send(Shutdown())
    with pytest.raises(InvalidRequest, match="config: the fleet stops"):
        fleet.send(NewConfig(fleet.rules, restarts))


def test_the_time_limits_of_a_service_are_those_of_its_config() -> None:
    fleet = Fleet().all_started()
    config = ClusterConfig(start_timeout_s=7.0, max_workers=9)
    fleet.send(NewConfig(replace(fleet.rules, claims=Claims(config), drain_timeout_s=3.0), restarts=True))
    fleet.placed("prefill-1")
    assert fleet.machine.next_deadline() == fleet.now + 7.0
    fleet.started("prefill-1")
    assert [action.timeout_s for action in fleet.of(DrainService)] == [30.0]  # type: ignore[union-attr]
    fleet.send(ScaleTo({D: 9, P: 0}))
    assert [action.timeout_s for action in fleet.of(DrainService)] == [3.0]  # type: ignore[union-attr]


def changing(fleet: Fleet, **rules: float) -> Fleet:
    fleet.send(NewConfig(replace(fleet.rules, **rules), False, "[router] max_queued"))  # type: ignore[arg-type]
    return fleet


def taken(fleet: Fleet, *names: str, revision: int = 2) -> None:
    for name in names:
        fleet.send(ServiceConfigured(fleet.members[name], revision))


def test_every_serving_service_gets_the_change_at_once_and_says_when_it_has_it() -> None:
    fleet = changing(Fleet().all_started())
    assert fleet.printed() == ["fleet takes config 2: [router] max_queued"]
    assert fleet.names(ConfigureService) == ["prefill-0", "decode-0", "router-0"]
    assert fleet.revisions() == {"router-0": 1, "prefill-0": 1, "decode-0": 1}
    taken(fleet, "decode-0")
    assert fleet.revisions() == {"router-0": 1, "prefill-0": 1, "decode-0": 2}
    assert fleet.send(Tick()) == [], "it is sent once"


def test_a_service_that_starts_meanwhile_gets_the_change_when_it_serves() -> None:
    fleet = Fleet()
    fleet.placed("decode-0")
    changing(fleet)
    assert not fleet.of(ConfigureService)
    fleet.send(ServiceStarted(fleet.members["decode-0"], "d", "host:1"))
    assert fleet.of(ConfigureService) == [ConfigureService(fleet.members["decode-0"], 2)]


def test_later_starts_have_the_newest_config_also_after_a_death_before_the_change_arrived() -> None:
    fleet = changing(Fleet().all_started())
    fleet.died("decode-0")
    fleet.send(Tick(), after_s=1.0)
    assert fleet.of(StartService) == [StartService(fleet.members["decode-0"], 2)]
    fleet.started("decode-0")
    assert not fleet.of(ConfigureService)
    fleet.send(ScaleTo({D: 2}))
    assert fleet.of(StartService) == [StartService(fleet.members["decode-1"], 2)]


def test_of_two_changes_the_answer_to_the_newer_one_counts() -> None:
    fleet = changing(changing(Fleet().all_started()))
    taken(fleet, "decode-0", revision=3)
    taken(fleet, "decode-0", revision=2)
    assert fleet.revisions()["decode-0"] == 3


def test_the_time_limits_of_the_fleet_itself_change_too() -> None:
    fleet = changing(Fleet().all_started(), drain_timeout_s=3.0)
    taken(fleet, "decode-0")
    fleet.send(ScaleTo({D: 0}))
    assert [action.timeout_s for action in fleet.of(DrainService)] == [3.0]  # type: ignore[union-attr]
    later = ClusterConfig(start_timeout_s=7.0, max_workers=4)
    fleet.send(NewConfig(replace(fleet.rules, claims=Claims(later)), False, "[cluster] start_timeout_s"))
    fleet.send(ScaleTo({D: 1}))
    fleet.placed("decode-1")
    assert fleet.machine.next_deadline() == fleet.now + 3.0 + 2.0, "the drain of decode-0"
    fleet.send(Drained(fleet.members["decode-0"]))
    assert fleet.machine.next_deadline() == fleet.now + 7.0


def test_a_roll_may_follow_a_change_and_restores_its_config() -> None:
    fleet = changing(Fleet().all_started())
    taken(fleet, "prefill-0", "decode-0", "router-0")
    fleet.send(NewConfig(fleet.rules, restarts=True))
    assert fleet.of(StartService)[0].revision == 3  # type: ignore[union-attr]
    fleet.send(StopRoll())
    status = fleet.machine.status(fleet.now)
    assert (status.revision, status.rolling) == (2, False)
    assert set(fleet.revisions().values()) == {2}
