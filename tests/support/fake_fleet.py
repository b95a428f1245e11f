"""A fleet that answers like a router, for tests of the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from core.errors import ModelNotFound, TandemError, Unauthenticated
from gateway.fleets import ModelUnknown
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2

SERVING = worker_pb2.WORKER_STATE_SERVING


@dataclass
class FakeFleet:
    """Set `failure` to make every call fail, `router_id` and `requests` to play another router."""

    router_id: str = "router-0-aa"
    address: str = "127.0.0.1:50051"
    failure: TandemError | None = None
    key: str = ""  # if set, the one authorization that is accepted
    num_calls: int = 0
    seen_metadata: list[tuple[str, str]] = field(default_factory=list)
    requests: list[cluster_pb2.RequestSummary] = field(default_factory=list)

    def __post_init__(self) -> None:
        roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
        self.workers = [make_worker(role) for role in roles]

    async def fleet(self, metadata: Sequence[tuple[str, str]]) -> cluster_pb2.GetFleetResponse:
        self._check(metadata)
        own = cluster_pb2.FleetRouter(
            router_id=self.router_id, address="127.0.0.1:50051", state=SERVING, num_queued=3, num_in_flight=9
        )
        other = cluster_pb2.FleetRouter(router_id="router-9-zz", address="127.0.0.1:50051", state=SERVING)
        return cluster_pb2.GetFleetResponse(
            workers=self.workers, routers=[own, other], num_queued=3, num_in_flight=9, wanted_prefill=2, wanted_decode=2
        )

    async def list_requests(
        self, limit: int, after: int, metadata: Sequence[tuple[str, str]]
    ) -> cluster_pb2.ListRequestsResponse:
        self._check(metadata)
        newer = [summary for summary in self.requests if summary.number > after]
        return cluster_pb2.ListRequestsResponse(requests=newer[::-1][:limit])

    async def get_trace(self, id: str, metadata: Sequence[tuple[str, str]]) -> cluster_pb2.Trace:
        self._check(metadata)
        found = [summary for summary in self.requests if id in (summary.request_id, summary.trace_id)]
        if not found:
            raise ModelNotFound(f"the router does not keep request {id!r}")
        root = cluster_pb2.Span(name="tandem.request", process=self.router_id, duration_ms=found[0].total_ms)
        pair = cluster_pb2.Candidate(prefill_worker="prefill-0", decode_worker="decode-0", chosen=True, cost_ms=36.5)
        alone = cluster_pb2.Candidate(decode_worker="decode-0", cost_ms=73.0)
        return cluster_pb2.Trace(requests=found, spans=[root], candidates=[pair, alone])

    def _check(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.num_calls += 1
        self.seen_metadata = list(metadata)
        if self.failure is not None:
            raise self.failure
        if self.key and dict(metadata).get("authorization") != self.key:
            raise Unauthenticated("authorization: an API key is needed")


class FakeFleets:
    """In the place of `gateway.fleets.Fleets`."""

    def __init__(self, **clients: FakeFleet) -> None:
        self._clients = clients

    def listed(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, model=name) for name in self._clients]

    def resolve(self, model: str) -> SimpleNamespace:
        if model and model not in self._clients:
            raise ModelUnknown(model, list(self._clients))
        return SimpleNamespace(router=self._clients[model or next(iter(self._clients))])


def make_worker(role: worker_pb2.WorkerRole) -> cluster_pb2.FleetWorker:
    load = worker_pb2.LoadReport(
        state=SERVING, num_decoding=4, decode_context=2000,
        ledger=worker_pb2.Ledger(free=600, cached=200, held=120, leased=50, incoming=30),
        step_cost=worker_pb2.StepCost(step_s=0.004, sequence_s=0.0005, context_s=1e-6),
    )  # fmt: skip
    return cluster_pb2.FleetWorker(worker_id=f"worker-{role}", role=role, state=SERVING, load=load)


def make_summary(number: int, now_ms: float, **changes: object) -> cluster_pb2.RequestSummary:
    """A request that has ended at `now_ms`, in milliseconds since 1970."""
    timings = inference_pb2.PhaseTimings(prefill_ms=40.0, transfer_ms=5.0, decode_ms=200.0)
    summary = cluster_pb2.RequestSummary(
        number=number, request_id=f"req-{number:04d}", trace_id=f"{number:032x}", total_ms=250.0, timings=timings,
        arrived_at_unix_ms=now_ms - 250.0, end="stop", path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
    )  # fmt: skip
    summary.MergeFrom(cluster_pb2.RequestSummary(**changes))  # type: ignore[arg-type]
    return summary
