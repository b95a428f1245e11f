"""Workers learn of the workers of the other pool that join and leave."""

from __future__ import annotations

from collections import Counter

import pytest

from core.lifecycle import ServiceRole
from core.paths import PeerJoined
from router.operations.fleet_metrics import readings
from router.requests.events import UpdatePeers
from router.requests.peer_discovery import MAX_ANNOUNCED_PEERS
from router.routing.worker_record import WorkerRecord
from runtime.prometheus.metrics import Metric
from tests.unit.router.driving_router import DrivenRouter, agent
from tests.unit.router.transcript import RouterReplay, transcripts

test_peers = transcripts(
    """
a joining worker and the other pool learn of each other
  fleet P0 P1 D0
  enter D1 -> peers D1 owner P0 owner P1; peers P0 reader D1; peers P1 reader D1
  enter P2 -> peers P2 reader D0 reader D1; peers D0 owner P2; peers D1 owner P2

the other pool learns of the loss of a worker
  fleet P D0 D1
  lost P -> peers D0 left P; peers D1 left P

a worker lost by silence is announced again after its next snapshot
  fleet P D
  time 5
  reports D
  time 6  -> peers D left P
  enter P -> peers P reader D; peers D owner P

a worker learns of a peer that died while no router ran
  # A new router: "dead" was a worker of an earlier router, and may still join.
  fleet P D
  paths D P dead
  time 9
  reports P
  reports D
  time 2 -> peers D left dead

a worker that is lost learns nothing more
  fleet P D
  paths D P dead
  time 5
  reports P
  time 5 -> peers P left D

a peer that joins late is kept
  fleet P D
  paths D P Plate
  time 5
  enter Plate -> peers Plate reader D; peers D owner Plate
  reports P
  reports D
  time 9
  reports P
  reports D
  reports Plate
  time 9

a worker learns of an absent peer that it reports later
  fleet P D
  time 9
  reports P
  reports D
  time 2
  paths P dead
  reports D
  time 9 -> peers P left dead
"""
)


def test_a_joining_worker_learns_of_a_few_peers_of_a_large_pool() -> None:
    owners = [f"P{number}" for number in range(40)]
    router = DrivenRouter(prefill=owners, decode=[])
    peers: Counter[str] = Counter()
    for name in (f"D{number}" for number in range(20)):
        first, *others = [a for a in router.join(name, ServiceRole.DECODE) if isinstance(a, UpdatePeers)]
        assert (first.worker_id, len(first.changes)) == (name, MAX_ANNOUNCED_PEERS)
        assert [other.changes for other in others] == [(PeerJoined(agent(name), False),)] * MAX_ANNOUNCED_PEERS
        peers.update(other.worker_id for other in others)
    assert len(peers) > 30, "joining workers learn of different peers"


def test_a_scrape_in_its_thread_counts_paths_while_the_loop_adds_and_removes_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = RouterReplay()
    router.fleet("P", "D")
    router.paths("D", "P", "late")
    view, worker = router.machine.view, router.machine.view.worker
    reports = iter([("late",), ("P", "late", "other")])

    def worker_and_a_report_meanwhile(worker_id: str) -> WorkerRecord | None:
        router.paths("D", *next(reports, ("P",)))
        return worker(worker_id.partition("@")[0])

    monkeypatch.setattr(view, "worker", worker_and_a_report_meanwhile)
    paths = [(labels["state"], value) for metric, value, labels in readings(view)() if metric is Metric.PATHS and value]
    assert paths == [("fine", 1)]
