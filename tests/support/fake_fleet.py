"""A fleet that answers like a router, for tests of the dashboard: requests and reports from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from core.errors import ModelNotFound, TandemError, Unauthenticated
from gateway.fleets import ModelUnknown
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2

SERVING, LOST = worker_pb2.WORKER_STATE_SERVING, worker_pb2.WORKER_STATE_LOST
NUM_BLOCKS = 1000


@dataclass
class FakeFleet:
    """Set `failure` to make every call fail, `router_id` and `requests` to play another router."""

    router_id: str = "router-0-aa"
    address: str = "127.0.0.1:50051"
    seed: int = 0
    failure: TandemError | None = None
    key: str = ""  # if set, the one authorization that is accepted
    num_calls: int = 0
    seen_metadata: list[tuple[str, str]] = field(default_factory=list)
    requests: list[cluster_pb2.RequestSummary] = field(default_factory=list)
    workers: list[cluster_pb2.FleetWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.workers:
            roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
            self.workers = [make_worker(role, ordinal, self.seed) for role in roles for ordinal in range(2)]

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
        return make_trace(found)

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


def make_worker(role: worker_pb2.WorkerRole, ordinal: int, seed: int) -> cluster_pb2.FleetWorker:
    rng = random.Random(f"{seed}/{role}/{ordinal}")
    name = "prefill" if role == worker_pb2.WORKER_ROLE_PREFILL else "decode"
    held, leased, incoming, cached = (rng.randrange(top) for top in (300, 60, 60, 400))
    ledger = worker_pb2.Ledger(
        free=NUM_BLOCKS - held - leased - incoming - cached, cached=cached, held=held, leased=leased, incoming=incoming
    )
    load = worker_pb2.LoadReport(
        state=SERVING, num_running=rng.randrange(8), num_waiting=rng.randrange(4), ledger=ledger,
        num_prefilled_tokens=rng.randrange(10_000), num_sampled_tokens=rng.randrange(10_000),
        num_decoding=4, decode_context=2000,
        step_cost=worker_pb2.StepCost(step_s=0.004, sequence_s=0.0005, context_s=1e-6),
    )  # fmt: skip
    return cluster_pb2.FleetWorker(
        worker_id=f"{name}-{ordinal}-{rng.randrange(16**4):04x}", role=role, state=SERVING,
        address=f"127.0.0.1:{6000 + ordinal}", load=load, report_age_ms=rng.uniform(5, 90), num_dispatched=2,
    )  # fmt: skip


def make_summary(number: int, now_ms: float, **changes: object) -> cluster_pb2.RequestSummary:
    """A request that has ended at `now_ms`, in milliseconds since 1970."""
    rng = random.Random(number)
    queue, prefill, transfer, decode = (
        rng.expovariate(0.2),
        rng.uniform(20, 90),
        rng.uniform(2, 12),
        rng.uniform(90, 700),
    )
    prompt, output = rng.randrange(80, 900), rng.randrange(2, 64)
    timings = inference_pb2.PhaseTimings(
        tokenize_ms=0.8, router_queue_ms=queue, prefill_queue_ms=1.5, prefill_ms=prefill, transfer_ms=transfer,
        transfer_exposed_ms=transfer / 3, decode_ms=decode, first_token_ms=queue + prefill + 4,
        total_ms=queue + prefill + 4 + decode,
    )  # fmt: skip
    summary = cluster_pb2.RequestSummary(
        number=number, request_id=f"req-{number:04d}", trace_id=f"{number:032x}", total_ms=timings.total_ms,
        arrived_at_unix_ms=now_ms - timings.total_ms, first_token_ms=timings.first_token_ms,
        tpot_ms=decode / (output - 1),
        end="stop" if number % 3 else "length",
        usage=inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=output, cached_tokens=prompt // 2),
        path=inference_pb2.REQUEST_PATH_DISAGGREGATED if number % 4 else inference_pb2.REQUEST_PATH_LOCAL,
        prefill_worker="prefill-0-aaaa", decode_worker="decode-1-bbbb", attempts=1, tenant="web", timings=timings,
        transferred_bytes=prompt * 2048,
    )  # fmt: skip
    summary.MergeFrom(cluster_pb2.RequestSummary(**changes))  # type: ignore[arg-type]
    return summary


def make_trace(requests: Sequence[cluster_pb2.RequestSummary]) -> cluster_pb2.Trace:
    spans = []
    for summary in requests:
        timings = summary.timings
        root = {"gen_ai.usage.input_tokens": str(summary.usage.prompt_tokens), "tandem.path": "disaggregated"}
        spans += [
            _span("tandem.request", "router-0-aa", summary, 0, summary.total_ms, root),
            _span("router.queue", "router-0-aa", summary, timings.tokenize_ms, timings.router_queue_ms),
            _span(
                "prefill_worker.prefill", summary.prefill_worker, summary, timings.router_queue_ms, timings.prefill_ms
            ),
            _span("decode_worker.decode", summary.decode_worker, summary, summary.first_token_ms, timings.decode_ms),
        ]
    pair = cluster_pb2.Candidate(
        prefill_worker="prefill-0-aaaa", decode_worker="decode-1-bbbb", cached_tokens=40, uncached_tokens=60,
        transfer_blocks=6, chosen=True, queue_ms=1.5, prefill_ms=33, transfer_ms=2, first_token_ms=36.5, cost_ms=36.5,
    )  # fmt: skip
    alone = cluster_pb2.Candidate(
        decode_worker="decode-1-bbbb", cached_tokens=0, uncached_tokens=100, prefill_ms=61, gap_ms=3, num_streams=4,
        first_token_ms=61, cost_ms=73,
    )  # fmt: skip
    return cluster_pb2.Trace(requests=requests, spans=spans, candidates=[pair, alone])


def _span(
    name: str,
    process: str,
    summary: cluster_pb2.RequestSummary,
    start_ms: float,
    duration_ms: float,
    attributes: dict[str, str] | None = None,
) -> cluster_pb2.Span:
    return cluster_pb2.Span(
        name=name, process=process, choice=summary.choice, start_ms=start_ms, duration_ms=duration_ms,
        attributes=attributes or {},
    )  # fmt: skip
