"""Workers learn of the workers of the other pool that join and leave."""

from __future__ import annotations

from collections import Counter

import pytest

from core.lifecycle import ServiceRole
from core.paths import PathState, PathStatus, PeerJoined, PeerLeft
from core.scheduling.worker_load import WorkerChanges
from router.operations.fleet_metrics import readings
from router.requests.events import UpdatePeers, WorkerLost, WorkerReported
from router.requests.peer_discovery import MAX_ANNOUNCED_PEERS
from router.routing.worker_record import WorkerRecord
from runtime.prometheus.metrics import Metric
from tests.unit.router.driving_router import CONFIG, DrivenRouter, agent


def owner(name: str) -> PeerJoined:
    return PeerJoined(agent(name), is_owner=True)


def reader(name: str) -> PeerJoined:
    return PeerJoined(agent(name), is_owner=False)


def test_a_joining_worker_and_the_other_pool_learn_of_each_other() -> None:
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


def test_a_joining_worker_learns_of_a_few_peers_of_a_large_pool() -> None:
    owners = [f"P{number}" for number in range(40)]
    router = DrivenRouter(prefill=owners, decode=[])
    peers: Counter[str] = Counter()
    for number in range(20):
        router.actions.clear()
        router.join(f"D{number}", ServiceRole.DECODE)
        (first, *others) = [action for action in router.actions if isinstance(action, UpdatePeers)]
        assert (first.worker_id, len(first.changes)) == (f"D{number}", MAX_ANNOUNCED_PEERS)
        assert [other.changes for other in others] == [(reader(f"D{number}"),)] * MAX_ANNOUNCED_PEERS
        peers.update(other.worker_id for other in others)
    assert len(peers) > 30, "joining workers learn of different peers"


def test_the_other_pool_learns_of_the_loss_of_a_worker() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D0", "D1"])
    gone = (PeerLeft(agent("P").name),)
    assert router.post(WorkerLost("P", "it died")) == [UpdatePeers("D0", gone), UpdatePeers("D1", gone)]


def test_a_worker_lost_by_silence_is_announced_again_after_its_next_snapshot() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    router.pass_time(5.0)
    router.report("D")
    gone = router.pass_time(6.0)
    assert gone == [UpdatePeers("D", (PeerLeft(agent("P").name),))]
    assert UpdatePeers("D", (owner("P"),)) in router.join("P", ServiceRole.PREFILL)


def report_paths(router: DrivenRouter, worker: str, *peers: str) -> None:
    known = router.machine.workers.chosen(worker).paths
    changed = tuple(PathStatus(agent(peer).name, PathState.FINE) for peer in peers if agent(peer).name not in known)
    removed = tuple(known.keys() - {agent(peer).name for peer in peers})
    router.post(WorkerReported(worker, WorkerChanges(paths=changed, removed_paths=removed)))


def report_for(router: DrivenRouter, seconds: int, **paths: tuple[str, ...]) -> None:
    """Every worker reports its paths once a second."""
    for _ in range(seconds):
        router.pass_time(1.0)
        for worker, peers in paths.items():
            report_paths(router, worker, *peers)


def test_a_worker_learns_of_a_peer_that_died_while_no_router_ran() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])  # a new router; "dead" was a worker of an earlier router
    router.actions.clear()
    report_for(router, 9, P=(), D=("P", "dead"))
    assert router.actions == [], "the peer may still join"
    report_for(router, 2, P=(), D=("P", "dead"))
    assert router.actions == [UpdatePeers("D", (PeerLeft(agent("dead").name),))]


def test_a_peer_that_joins_late_is_kept() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    report_for(router, 5, P=(), D=("P", "late"))
    router.join("late", ServiceRole.PREFILL)
    router.actions.clear()
    report_for(router, 30, P=(), late=(), D=("P", "late"))
    assert router.actions == []


def test_a_worker_learns_of_an_absent_peer_that_it_reports_later() -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    report_for(router, 25, P=(), D=("P",))
    router.actions.clear()
    report_for(router, int(CONFIG.worker_lost_s) + 1, P=("dead",), D=("P",))
    assert router.actions == [UpdatePeers("P", (PeerLeft(agent("dead").name),))]


def test_a_scrape_in_its_thread_counts_paths_while_the_loop_adds_and_removes_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = DrivenRouter(prefill=["P"], decode=["D"])
    report_for(router, 1, P=(), D=("P", "late"))
    view, worker = router.machine.view, router.machine.view.worker
    reports = iter([("late",), ("P", "late", "other")])

    def worker_and_a_report_meanwhile(worker_id: str) -> WorkerRecord | None:
        report_paths(router, "D", *next(reports, ("P",)))
        return worker(worker_id.partition("@")[0])

    monkeypatch.setattr(view, "worker", worker_and_a_report_meanwhile)
    paths = [(labels["state"], value) for metric, value, labels in readings(view)() if metric is Metric.PATHS and value]
    assert paths == [("fine", 1)]
