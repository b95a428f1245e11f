"""Who is told of whom when workers come and go."""

from __future__ import annotations

from dataclasses import replace

from core.lifecycle import ServiceRole
from core.paths import PathState, PathStatus, PeerDismissed, PeerIntroduced
from router.events import Introduce, WorkerLost, WorkerReported
from tests.unit.router.driving_router import CONFIG, SERVING, DrivenRouter, agent


def owner(name: str) -> PeerIntroduced:
    return PeerIntroduced(agent(name), is_owner=True)


def reader(name: str) -> PeerIntroduced:
    return PeerIntroduced(agent(name), is_owner=False)


def test_a_worker_that_joins_meets_the_other_pool_and_they_meet_it() -> None:
    router = DrivenRouter(prefill=["P0", "P1"], decode=["D0"])
    router.actions.clear()
    router.join("D1", ServiceRole.DECODE)
    assert router.actions == [
        Introduce("D1", (owner("P0"), owner("P1"))),
        Introduce("P0", (reader("D1"),)),
        Introduce("P1", (reader("D1"),)),
    ]
    router.actions.clear()
    router.join("P2", ServiceRole.PREFILL)
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
    assert Introduce("D", (owner("P"),)) in router.join("P", ServiceRole.PREFILL)


def report_paths(router: DrivenRouter, worker: str, *peers: str) -> None:
    paths = tuple(PathStatus(agent(peer).name, PathState.FINE) for peer in peers)
    router.post(WorkerReported(worker, replace(SERVING, paths=paths)))


def live_on(router: DrivenRouter, seconds: int, **paths: tuple[str, ...]) -> None:
    """Every worker goes on reporting its paths."""
    for _ in range(seconds):
        router.pass_time(1.0)
        for worker, peers in paths.items():
            report_paths(router, worker, *peers)


def test_a_peer_that_died_while_no_router_lived_is_let_go() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])  # started anew; "dead" was known to the one before
    router.actions.clear()
    live_on(router, 9, P=(), D=("P", "dead"))
    assert router.actions == [], "it may still join"
    live_on(router, 2, P=(), D=("P", "dead"))
    assert router.actions == [Introduce("D", (PeerDismissed(agent("dead").name),))]


def test_a_peer_that_joins_late_is_kept() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    live_on(router, 5, P=(), D=("P", "late"))
    router.join("late", ServiceRole.PREFILL)
    router.actions.clear()
    live_on(router, 30, P=(), late=(), D=("P", "late"))
    assert router.actions == []


def test_a_stranger_that_turns_up_later_in_the_paths_is_let_go_as_well() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    live_on(router, 25, P=(), D=("P",))
    router.actions.clear()
    live_on(router, int(CONFIG.worker_lost_s) + 1, P=("dead",), D=("P",))
    assert router.actions == [Introduce("P", (PeerDismissed(agent("dead").name),))]
