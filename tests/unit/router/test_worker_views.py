"""What the router tells workers of each other, and what it knows of their load: their reports and its calls."""

from __future__ import annotations

from collections import Counter

import pytest

from core.handoff import OwnerState, PullerState
from core.paths import PeerJoined
from router.operations.fleet_metrics import readings
from router.requests.events import UpdatePeers
from router.requests.peer_discovery import MAX_ANNOUNCED_PEERS
from router.routing.worker_record import WorkerRecord
from runtime.prometheus.metrics import Metric
from tests.unit.router.driving_router import DrivenRouter, agent, transcripts

test_peers = transcripts(
    """
a joining worker and the other pool learn of each other, and of its loss
  fleet P0 P1 D0
  enter D1 -> peers D1 owner P0 owner P1; peers P0 reader D1; peers P1 reader D1
  enter P2 -> peers P2 reader D0 reader D1; peers D0 owner P2; peers D1 owner P2
  lost P2  -> peers D0 left P2; peers D1 left P2

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

test_loads = transcripts(
    """
a load is the report and the calls that had not arrived
  fleet D
  arrives a prompt=20 -> decode a#1 D
  arrives b prompt=30 -> decode b#1 D
  load D              -> D 0.05013 s, 2 sequences, 51 blocks
  # Call 2 was on the way, and stands for a call of the other router too.
  reports D backlog=0.1 num_calls=4 routers=another:70:3,router:1:1
  load D              -> D 0.16018 s, 5 sequences, 48 blocks
  reports D backlog=0.09 num_calls=5 routers=another:70:3,router:2:2
  load D              -> D 0.09 s, 5 sequences, 64 blocks
  # The end is faster than the next report.
  decode_error b#1 WorkerUnavailable reset
  load D              -> D 0.09 s, 4 sequences, 64 blocks

a router whose worker is lost counts no more
  fleet D
  arrives a prompt=20 -> decode a#1 D
  enter E routers=second:9:1
  load D              -> D 0.04008 s, 1 sequences, 54 blocks
  lost E
  load D              -> D 0.02004 s, 1 sequences, 59 blocks

calls that no router has sent are no other router
  fleet D
  reports D num_calls=1 routers=:0:1
  arrives a prompt=20 -> decode a#1 D
  load D              -> D 0.02004 s, 2 sequences, 59 blocks

the calls of a pair bring prompt work to one worker and blocks to the other
  fleet P D
  arrives a prompt=21 -> decode a#1 D from P/1; prefill a#1 P for D/1
  load P D            -> P 0.0210441 s, 1 sequences, 64 blocks; D 0 s, 1 sequences, 58 blocks
  reports P backlog=0.021 num_calls=1 routers=router:2:1
  # The report promises the blocks, so the call does not take them again.
  reports D num_promised_blocks=6 num_calls=1 routers=router:1:1
  load P D            -> P 0.021 s, 1 sequences, 64 blocks; D 0 s, 1 sequences, 58 blocks
  # The call has ended, and the next report tells the work.
  prefilled a#1 11    -> deliver a 0: 11
  load P              -> P 0.021 s, 0 sequences, 64 blocks
"""
)


def test_a_joining_worker_learns_of_a_few_peers_of_a_large_pool() -> None:
    owners = [f"P{number}" for number in range(40)]
    router = DrivenRouter(prefill=owners, decode=[])
    peers: Counter[str] = Counter()
    for name in (f"D{number}" for number in range(20)):
        first, *others = [a for a in router.enter(name) if isinstance(a, UpdatePeers)]
        assert (first.worker_id, len(first.changes)) == (name, MAX_ANNOUNCED_PEERS)
        assert [other.changes for other in others] == [(PeerJoined(agent(name), False),)] * MAX_ANNOUNCED_PEERS
        peers.update(other.worker_id for other in others)
    assert len(peers) > 30, "joining workers learn of different peers"


def test_a_fleet_awaits_its_first_prefill_worker_and_no_later_one() -> None:
    """Decode workers compute the prompts behind the loss of the last one."""
    router = DrivenRouter(prefill=())
    view = router.machine.view
    view.begins_with_prefill = True
    assert view.awaits_prefill
    router.fleet("P")
    router.lost("P")
    assert not view.awaits_prefill


def test_a_scrape_in_its_thread_counts_paths_while_the_loop_adds_and_removes_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = DrivenRouter()
    router.paths("D", "P", "late")
    view, worker = router.machine.view, router.machine.view.worker
    reports = iter([("late",), ("P", "late", "other")])

    def worker_and_a_report_meanwhile(worker_id: str) -> WorkerRecord | None:
        router.paths("D", *next(reports, ("P",)))
        return worker(worker_id.partition("@")[0])

    monkeypatch.setattr(view, "worker", worker_and_a_report_meanwhile)
    paths = [(labels["state"], value) for metric, value, labels in readings(view)() if metric is Metric.PATHS and value]
    assert paths == [("fine", 1)]


def test_the_page_shows_transfers_by_side_and_state_and_what_strangers_sent() -> None:
    router = DrivenRouter(prefill=())
    counts = {OwnerState.OFFERED: 2, PullerState.READING: 3}
    router.reports("D", transfers=counts, num_malformed_messages=4, num_dropped_messages=5)
    found = [(metric, value, labels) for metric, value, labels in readings(router.machine.view)() if value]
    transfers = {
        (labels["side"], labels["state"]): value for metric, value, labels in found if metric is Metric.WORKER_TRANSFERS
    }
    assert transfers == {("offer", "offered"): 2, ("pull", "reading"): 3}
    totals = {metric: value for metric, value, _ in found}
    assert totals[Metric.WORKER_MALFORMED_MESSAGES] == 4
    assert totals[Metric.WORKER_DROPPED_MESSAGES] == 5
