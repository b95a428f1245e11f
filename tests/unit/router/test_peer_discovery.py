"""Which workers are told of each other when workers come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from core.lifecycle import ServiceRole
from core.paths import PathState, PathStatus, PeerJoined, PeerLeft
from router.events import UpdatePeers, WorkerLost, WorkerReported
from router.peer_discovery import MAX_ANNOUNCED_PEERS
from tests.unit.router.driving_router import CONFIG, SERVING, DrivenRouter, agent


def owner(name: str) -> PeerJoined:
    return PeerJoined(agent(name), is_owner=True)


def reader(name: str) -> PeerJoined:
    return PeerJoined(agent(name), is_owner=False)


def test_a_worker_that_joins_meets_the_other_pool_and_they_meet_it() -> None:
    router = DrivenRouter(prefill=["P0", "P1"], decode=["D0"])
    router.actions.clear()
    router.join("D1", ServiceRole.DECODE)
    assert router.actions == [
        UpdatePeers("D1", (owner("P0"), owner("P1"))),
        UpdatePeers("P0", (reader("D1"),)),
        UpdatePeers("P1", (reader("D1"),)),
    ]
    router.actions.clear()
    router.join("P2", ServiceRole.PREFILL)
    assert router.actions == [
        UpdatePeers("P2", (reader("D0"), reader("D1"))),
        UpdatePeers("D0", (owner("P2"),)),
        UpdatePeers("D1", (owner("P2"),)),
    ]


def test_the_first_worker_meets_nobody() -> None:
    assert DrivenRouter(prefill=[], decode=["D0", "D1"]).actions == []


def test_a_worker_is_introduced_to_a_few_peers_of_a_large_pool() -> None:
    owners = [f"P{number}" for number in range(40)]
    router = DrivenRouter(prefill=owners, decode=[])
    introduced: Counter[str] = Counter()
    for number in range(20):
        router.actions.clear()
        router.join(f"D{number}", ServiceRole.DECODE)
        (first, *others) = [action for action in router.actions if isinstance(action, UpdatePeers)]
        assert (first.worker_id, len(first.changes)) == (f"D{number}", MAX_ANNOUNCED_PEERS)
        assert [other.changes for other in others] == [(reader(f"D{number}"),)] * MAX_ANNOUNCED_PEERS
        introduced.update(other.worker_id for other in others)
    assert len(introduced) > 30, "the workers that join are spread over the pool"


def test_a_worker_that_is_lost_is_forgotten_by_the_other_pool() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D0", "D1"])
    gone = (PeerLeft(agent("P").name),)
    assert router.post(WorkerLost("P", "it died")) == [UpdatePeers("D0", gone), UpdatePeers("D1", gone)]


def test_a_worker_that_is_silent_for_too_long_is_forgotten_and_announced_again_when_it_reports() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    router.pass_time(5.0)
    router.report("D")
    gone = router.pass_time(6.0)
    assert gone == [UpdatePeers("D", (PeerLeft(agent("P").name),))]
    assert UpdatePeers("D", (owner("P"),)) in router.join("P", ServiceRole.PREFILL)


def report_paths(router: DrivenRouter, worker: str, *peers: str) -> None:
    paths = tuple(PathStatus(agent(peer).name, PathState.FINE) for peer in peers)
    router.post(WorkerReported(worker, replace(SERVING, paths=paths)))


def live_on(router: DrivenRouter, seconds: int, **paths: tuple[str, ...]) -> None:
    """Every worker goes on reporting its paths."""
    for _ in range(seconds):
        router.pass_time(1.0)
        for worker, peers in paths.items():
            report_paths(router, worker, *peers)


def test_a_peer_that_died_while_no_router_ran_is_forgotten() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])  # started anew; "dead" was known to the one before
    router.actions.clear()
    live_on(router, 9, P=(), D=("P", "dead"))
    assert router.actions == [], "it may still join"
    live_on(router, 2, P=(), D=("P", "dead"))
    assert router.actions == [UpdatePeers("D", (PeerLeft(agent("dead").name),))]


def test_a_peer_that_joins_late_is_kept() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    live_on(router, 5, P=(), D=("P", "late"))
    router.join("late", ServiceRole.PREFILL)
    router.actions.clear()
    live_on(router, 30, P=(), late=(), D=("P", "late"))
    assert router.actions == []


def test_a_stranger_that_is_reported_later_is_forgotten_as_well() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    live_on(router, 25, P=(), D=("P",))
    router.actions.clear()
    live_on(router, int(CONFIG.worker_lost_s) + 1, P=("dead",), D=("P",))
    assert router.actions == [UpdatePeers("P", (PeerLeft(agent("dead").name),))]
