"""Ended choices as messages of the Cluster service: RequestSummary and Trace."""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter

from core.errors import ErrorCode, InvalidRequest, TandemError, quoted
from core.lifecycle import Stage
from protos import codec
from router.operations.request_ring import CAPACITY, RequestRing, RingEntry
from router.operations.request_spans import num_attempts, spans_of
from router.routing.question import TERMS, Candidate
from router.serving.ended_choice import EndedChoice
from router.serving.receipt import phase_timings
from runtime.tracing.telemetry import AttributeValue
from tandem_client.stubs import cluster_pb2, inference_pb2

DEFAULT_LIMIT = 100
MAX_CANDIDATES = 8


class RequestUnknown(TandemError):
    """The router does not keep the request (any more)."""

    code = ErrorCode.NOT_FOUND


def list_requests(ring: RequestRing, request: cluster_pb2.ListRequestsRequest) -> cluster_pb2.ListRequestsResponse:
    """Raises `InvalidRequest`."""
    if request.limit > CAPACITY:
        raise InvalidRequest("limit", f"must be in [1, {CAPACITY}], or 0 for {DEFAULT_LIMIT}, is {request.limit}")
    newest = ring.newest(request.limit or DEFAULT_LIMIT, request.after)
    return cluster_pb2.ListRequestsResponse(requests=map(_summary, newest))


def trace_of(ring: RequestRing, name: str, router_id: str) -> cluster_pb2.Trace:
    """Raises `RequestUnknown`."""
    found = ring.find(name)
    if not found:
        raise RequestUnknown(f"{router_id} keeps no request {quoted(name)}, only the last {CAPACITY} of its own")
    last = found[-1].ended
    trace = cluster_pb2.Trace(requests=map(_summary, found))
    for entry in found:
        trace.spans.extend(_spans(entry.ended, router_id))
    if last.attempts:
        attempt = last.attempts[-1]
        others = [candidate for candidate in attempt.compared if candidate is not attempt.candidate]
        cheapest = [attempt.candidate, *nsmallest(MAX_CANDIDATES - 1, others, key=attrgetter("order"))]
        cheapest.sort(key=attrgetter("order"))
        trace.candidates.extend(encode_candidate(candidate, candidate is attempt.candidate) for candidate in cheapest)
    return trace


def _summary(entry: RingEntry) -> cluster_pb2.RequestSummary:
    """Made once for all who ask: the summaries of a full ring take 7 ms of the loop."""
    if entry.summary is None:
        entry.summary = _encode(entry.number, entry.ended)
    return entry.summary


def _encode(number: int, ended: EndedChoice) -> cluster_pb2.RequestSummary:
    candidate = ended.attempts[-1].candidate if ended.attempts else None
    summary = cluster_pb2.RequestSummary(
        number=number,
        request_id=ended.request_id,
        choice=ended.choice,
        trace_id=ended.trace.trace_id_hex,
        arrived_at_unix_ms=ended.arrived_unix_s * 1e3,
        total_ms=ended.total_s * 1e3,
        first_token_ms=ended.first_token_s * 1e3,
        tpot_ms=ended.tpot_s * 1e3,
        end=ended.end,
        attempts=num_attempts(ended),
        tenant=ended.tenant,
        timings=_timings(ended),
    )
    if candidate is not None:
        summary.prefill_worker = candidate.prefill_worker or candidate.decode_worker
        summary.decode_worker = candidate.decode_worker
    summary.usage.prompt_tokens, summary.usage.completion_tokens = ended.num_prompt_tokens, ended.num_output_tokens
    if (outcome := ended.outcome) is not None:
        summary.path = codec.PATH_TO_WIRE[outcome.path]
        summary.transferred_bytes = outcome.transferred_bytes
        summary.usage.cached_tokens = outcome.cached_tokens
    return summary


def _timings(ended: EndedChoice) -> inference_pb2.PhaseTimings:
    """Of a failed request, what the router knows itself."""
    if ended.outcome is not None:
        return phase_timings(ended.outcome, ended.total_s)
    seconds = dict.fromkeys(Stage, 0.0)
    for stage, start, end in ended.stages:
        seconds[stage] += end - start
    return inference_pb2.PhaseTimings(
        tokenize_ms=seconds[Stage.TOKENIZE] * 1e3,
        router_queue_ms=seconds[Stage.QUEUE] * 1e3,
        first_token_ms=ended.first_token_s * 1e3,
        decode_ms=seconds[Stage.DECODE] * 1e3,
        total_ms=ended.total_s * 1e3,
    )


def _spans(ended: EndedChoice, router_id: str) -> list[cluster_pb2.Span]:
    root, *others = spans_of(ended, router_id)
    spans = [root, *sorted(others, key=lambda span: span.start)]
    return [
        cluster_pb2.Span(
            name=span.name.value,
            process=span.process,
            choice=ended.choice,
            start_ms=(span.start - ended.arrived_at) * 1e3,
            duration_ms=(span.end - span.start) * 1e3,
            attributes={key: _text(value) for key, value in span.attributes.items()},
            error=span.error,
        )
        for span in spans
    ]


def _text(value: AttributeValue) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, int) else ", ".join(value)


def encode_candidate(candidate: Candidate, chosen: bool) -> cluster_pb2.Candidate:
    return cluster_pb2.Candidate(
        prefill_worker=candidate.prefill_worker or "",
        decode_worker=candidate.decode_worker,
        cached_tokens=candidate.cached_tokens,
        uncached_tokens=candidate.uncached_tokens,
        transfer_blocks=candidate.transfer_blocks,
        chosen=chosen,
        num_streams=candidate.num_streams,
        first_token_ms=candidate.first_token_s * 1e3,
        cost_ms=candidate.cost * 1e3,
        source=candidate.read.source or "",
        read_tokens=candidate.read.num_tokens,
        read_ms=candidate.read.seconds * 1e3,
        **{name: getattr(candidate, term) * 1e3 for term, name in TERMS.items()},
    )
