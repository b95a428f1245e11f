"""Who is told of whom when workers come and go."""

from __future__ import annotations

from core.lifecycle import WorkerRole
from core.paths import PeerDismissed, PeerIntroduced
from router.events import Introduce, WorkerLost
from tests.unit.router.driving_router import DrivenRouter, agent


def owner(name: str) -> PeerIntroduced:
    return PeerIntroduced(agent(name), is_owner=True)


def reader(name: str) -> PeerIntroduced:
    return PeerIntroduced(agent(name), is_owner=False)


def test_a_worker_that_joins_meets_the_other_pool_and_they_meet_it() -> None:
    router = DrivenRouter(prefill=["P0", "P1"], decode=["D0"])
    router.actions.clear()
    router.join("D1", WorkerRole.DECODE)
    assert router.actions == [
        Introduce("D1", (owner("P0"), owner("P1"))),
        Introduce("P0", (reader("D1"),)),
        Introduce("P1", (reader("D1"),)),
    ]
    router.actions.clear()
    router.join("P2", WorkerRole.PREFILL)
    assert router.actions == [
        Introduce("P2", (reader("D0"), reader("D1"))),
        Introduce("D0", (owner("P2"),)),
        Introduce("D1", (owner("P2"),)),
    ]


def test_the_first_worker_meets_nobody() -> None:
    assert DrivenRouter(prefill=[], decode=["D0", "D1"]).actions == []


def test_a_worker_that_is_lost_is_let_go_by_the_others() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D0", "D1"])
    gone = (PeerDismissed(agent("P").name),)
    assert router.post(WorkerLost("P", "it died")) == [Introduce("D0", gone), Introduce("D1", gone)]


def test_a_worker_that_is_silent_for_too_long_is_let_go_and_met_again_when_it_speaks() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    router.pass_time(5.0)
    router.report("D")
    gone = router.pass_time(6.0)
    assert gone == [Introduce("D", (PeerDismissed(agent("P").name),))]
    assert Introduce("D", (owner("P"),)) in router.join("P", WorkerRole.PREFILL)
