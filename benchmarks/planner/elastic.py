"""A replay in which the pools change their sizes, with the machines of production.

A drained worker ends when it has moved or finished its sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.planner.elastic_fleet import ElasticFleet, SizeChange, Sizing, num_reversals
from core.config import ClusterConfig
from core.errors import TandemError
from core.lifecycle import ServiceRole, Stage, Timeline
from core.request import Request
from core.service import Endpoint
from core.traffic import RouterTraffic
from fleet.law.events import Member
from router.operations.traffic_count import TrafficCount
from router.requests import events
from simulator.processes import CountEnded
from simulator.replay.replay import START_S, Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import ReplayResult
from simulator.replay.served import ServedRequests
from simulator.replay.workloads import Workload
from simulator.shells.links import BreakableLinks
from simulator.shells.router_shell import RouterShell
from simulator.virtual.world import World

MAX_WORKERS = 64  # of a pool


@dataclass(frozen=True, slots=True)
class ElasticResult:
    replay: ReplayResult
    worker_hours: float  # from the decision to start a worker until it has left
    changes: tuple[SizeChange, ...]
    num_switches: int
    num_recomputed: int  # requests that a drain or a switch has made start anew
    notes: tuple[str, ...]  # of the planner

    @property
    def reversals_per_hour(self) -> float:
        return num_reversals(self.changes) / (self.replay.duration_s / 3600.0)


class CountedRequests(ServedRequests):
    """Counts as a router does in production."""

    def __init__(self, world: World, slo_ttft_s: float) -> None:
        super().__init__(world)
        self._slo_ttft_s = slo_ttft_s
        self.counts: defaultdict[str, TrafficCount] = defaultdict(TrafficCount)  # by router

    def expect(self, request: Request, router: str) -> None:
        super().expect(request, router)
        self.counts[router].arrived(1)

    def finished(self, request_id: str, outcome: events.Outcome) -> None:
        self._count(events.Finish(request_id, outcome))
        super().finished(request_id, outcome)

    def failed(self, request_id: str, error: TandemError) -> None:
        self._count(events.Fail(request_id, error, Timeline(Stage.FINISHED, self._open[request_id].arrived_at)))
        super().failed(request_id, error)

    def refused(self, request_id: str, error: TandemError) -> None:
        self.failed(request_id, error)

    def _count(self, end: events.Finish | events.Fail) -> None:
        self.counts[self._open[end.request_id].router].ended(end, self._slo_ttft_s)


class ElasticReplay(Replay):
    """`config.num_prefill` and `num_decode` are the first sizes."""

    clients: CountedRequests

    def __init__(self, workload: Workload, config: ReplayConfig, sizing: Sizing, start_s: float) -> None:
        super().__init__(workload, config)
        cluster = ClusterConfig(
            num_routers=config.num_routers,
            num_prefill=config.num_prefill,
            num_decode=config.num_decode,
            max_workers=MAX_WORKERS,
            start_timeout_s=1e6,
        )
        self._fleet = ElasticFleet(self.world, cluster, sizing, start_s, self, START_S)

    def _new_clients(self) -> CountedRequests:
        return CountedRequests(self.world, self.config.slo_ttft_s)

    def _first_workers(self) -> list[tuple[ServiceRole, int]]:
        return []  # the fleet starts them

    def _router(self, name: str) -> RouterShell:
        router = RouterShell(name, self.world, self.config.router, self.clients, self.config.new_policy)
        router.links = BreakableLinks(self.world, router, self.network, self.workers)
        return router

    def run_elastic(self, on_progress: CountEnded = lambda _: None) -> ElasticResult:
        """Raises as `run`."""
        self._fleet.start(self._is_done)
        result = self.run(on_progress)
        return ElasticResult(
            result,
            self._fleet.worker_s / 3600.0,
            tuple(self._fleet.changes),
            self._fleet.shell.num_switches,
            sum(record.path == "recomputed" for record in result.requests),
            tuple(self._fleet.notes),
        )

    # ---- the workers of the fleet

    def readings(self) -> Iterable[tuple[str, RouterTraffic]]:
        for router in self.routers:
            yield router.name, self.clients.counts[router.name].reading(router.machine.view, self.config.slo_ttft_s)

    def start_service(self, service_id: str, member: Member) -> None:
        self._add_worker(service_id, member.role)

    def drain_service(self, service_id: str) -> None:
        self.workers[service_id].drain()

    def is_idle(self, service_id: str) -> bool:
        return self.workers[service_id].is_idle

    def switch_service(self, service_id: str) -> None:
        self.workers[service_id].switch_role()

    def end_service(self, service_id: str, killed: bool) -> None:
        worker = self.workers[service_id]
        worker.die(silent=False, killed=killed)
        for router in self.routers:
            _links_of(router).notice_death(worker)

    def publish(self, router: Member, workers: Sequence[Endpoint]) -> None:
        _links_of(self.routers[router.ordinal]).set_workers(workers)


def _links_of(router: RouterShell) -> BreakableLinks:
    assert isinstance(router.links, BreakableLinks)
    return router.links
