"""FleetMachine gives every service other live options while it serves, and later starts the newest config."""

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
    NewConfig,
    ScaleTo,
    ServiceConfigured,
    ServiceStarted,
    Shutdown,
    StartService,
    StopRoll,
)
from tests.unit.fleet.driving_fleet import D, Fleet


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


def test_a_change_is_refused_while_the_fleet_rolls_or_stops() -> None:
    fleet = Fleet().all_started()
    fleet.send(NewConfig(fleet.rules, restarts=True))
    with pytest.raises(InvalidRequest, match="config: the fleet rolls already"):
        changing(fleet)
    fleet.send(Shutdown())
    with pytest.raises(InvalidRequest, match="config: the fleet stops"):
        changing(fleet)


def test_a_roll_may_follow_a_change_and_restores_its_config() -> None:
    fleet = changing(Fleet().all_started())
    taken(fleet, "prefill-0", "decode-0", "router-0")
    fleet.send(NewConfig(fleet.rules, restarts=True))
    assert fleet.of(StartService)[0].revision == 3  # type: ignore[union-attr]
    fleet.send(StopRoll())
    status = fleet.machine.status(fleet.now)
    assert (status.revision, status.rolling) == (2, False)
    assert set(fleet.revisions().values()) == {2}
