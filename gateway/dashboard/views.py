"""The data of the dashboard's page: JSON made from the answers of a router.

Names end in their unit. Every count "since the start" stays a count: the page turns two of them into a rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from core.wire_names import short_name
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2

Json = dict[str, Any]

COLUMNS = ("free", "cached", "held", "leased", "incoming")  # of the KV ledger, in the order of the page
LOADS = (
    "num_running", "num_waiting", "num_pulls_waiting", "num_queued_tokens", "num_decoding", "num_prefilled_tokens",
    "num_sampled_tokens", "transferred_bytes", "transfer_seconds", "num_preemptions", "num_expired_leases",
    "num_corrupt_blocks",
)  # fmt: skip
SUMMARIES = (
    "number", "choice", "trace_id", "arrived_at_unix_ms", "total_ms", "first_token_ms", "tpot_ms", "end",
    "prefill_worker", "decode_worker", "attempts", "tenant", "transferred_bytes",
)  # fmt: skip
SPANS = ("name", "process", "choice", "start_ms", "duration_ms", "error")
PHASES = (
    "tokenize_ms", "router_queue_ms", "prefill_queue_ms", "prefill_ms", "transfer_ms", "transfer_exposed_ms",
    "decode_ms",
)  # fmt: skip


def answering_router(fleet: cluster_pb2.GetFleetResponse) -> str:
    """The id of the router that answered: the only one that knows its own queue. Empty if none is listed."""
    return next((router.router_id for router in fleet.routers if router.HasField("num_queued")), "")


def fleet_view(fleet: cluster_pb2.GetFleetResponse) -> Json:
    return {
        "router": answering_router(fleet),
        "routers": [_router_view(router) for router in fleet.routers],
        "workers": [_worker_view(worker) for worker in fleet.workers],
        "num_queued": fleet.num_queued,
        "num_in_flight": fleet.num_in_flight,
        "wanted": {"prefill": fleet.wanted_prefill, "decode": fleet.wanted_decode, "router": fleet.wanted_routers},
    }


def _router_view(router: cluster_pb2.FleetRouter) -> Json:
    known = router.HasField("num_queued")
    return {
        "id": router.router_id,
        "address": router.address,
        "state": _state(router.state),
        "num_queued": router.num_queued if known else None,
        "num_in_flight": router.num_in_flight if known else None,
    }


def _worker_view(worker: cluster_pb2.FleetWorker) -> Json:
    load = worker.load
    return {
        "id": worker.worker_id,
        "role": short_name(worker_pb2.WorkerRole, worker.role),
        "state": _state(worker.state),
        **_fields(worker, ("address", "report_age_ms", "num_dispatched")),
        **_fields(load, LOADS),
        "blocks": _fields(load.ledger, COLUMNS),
        "step_ms": _step_ms(load),
        "paths": [_path_view(path) for path in load.paths],
    }


def _step_ms(load: worker_pb2.LoadReport) -> float:
    """The predicted time of a step of the sequences in decode, without prompts (core/cost/step_cost.py)."""
    cost = load.step_cost
    return 1e3 * (cost.step_s + load.num_decoding * cost.sequence_s + load.decode_context * cost.context_s)


def _path_view(path: worker_pb2.PathReport) -> Json:
    return {
        "peer": path.peer,
        "state": short_name(worker_pb2.PathState, path.state),
        "lane": short_name(worker_pb2.PathLane, path.lane),
        "bytes_per_s": path.bytes_per_s,
    }


def request_view(summary: cluster_pb2.RequestSummary) -> Json:
    return {
        "id": summary.request_id,
        **_fields(summary, SUMMARIES),
        **_fields(summary.usage, ("prompt_tokens", "cached_tokens", "completion_tokens")),
        "path": _path_name(summary.path),
        "phases": _fields(summary.timings, PHASES) if summary.HasField("timings") else None,
    }


def trace_view(trace: cluster_pb2.Trace) -> Json:
    return {
        "requests": [request_view(summary) for summary in trace.requests],
        "spans": [_fields(span, SPANS) | {"attributes": dict(sorted(span.attributes.items()))} for span in trace.spans],
        "candidates": [_fields(candidate, candidate.DESCRIPTOR.fields_by_name) for candidate in trace.candidates],
    }


def _fields(message: Message, names: Iterable[str]) -> Json:
    return {name: getattr(message, name) for name in names}


def _state(state: worker_pb2.WorkerState) -> str:
    return short_name(worker_pb2.WorkerState, state)


def _path_name(path: inference_pb2.RequestPath) -> str:
    """Empty for a request that never took a path."""
    name = short_name(inference_pb2.RequestPath, path)
    return "" if name == "unspecified" else name
