"""Traces: one per request. The two tables below list every span name and every attribute name.

The router opens the root span. At the end of the request it adds one child span per stage; each child starts where the
previous one ends. Workers add the spans of their stages to the same root, through the W3C `traceparent` header.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from core.config import TelemetryConfig
from core.errors import ConfigError
from core.lifecycle import Stage, Timeline

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
EXPORT_DELAY_MS = 500.0  # a span is exported at most this long after its end

AttributeValue = str | int | float | bool | Sequence[str]


class SpanName(Enum):
    """The name of every span. Its first word names the process that measured the span."""

    REQUEST = "tandem.request"  # root: one choice of a Generate call, arrival to last token; or a refused call
    ROUTER_TOKENIZE = "router.tokenize"
    ROUTER_QUEUE = "router.queue"
    ROUTER_PREFILL = "router.prefill"  # dispatch to first token, measured by the router
    ROUTER_DECODE = "router.decode"  # first token to last token
    ROUTER_RESPOND = "router.respond"  # end of generation to the last message written to the client
    PREFILL_QUEUE = "prefill_worker.queue"
    PREFILL_COMPUTE = "prefill_worker.prefill"
    DECODE_QUEUE = "decode_worker.queue"  # wait for blocks or for a place in a step
    DECODE_PREFILL = "decode_worker.prefill"  # local prefill
    DECODE_TRANSFER = "decode_worker.transfer"  # first block wanted to last block verified
    DECODE_COMPUTE = "decode_worker.decode"


class Attribute:
    """Every span attribute. Names that do not start with tandem. are OpenTelemetry's semantic conventions."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    TEMPERATURE = "gen_ai.request.temperature"
    TOP_P = "gen_ai.request.top_p"
    TOP_K = "gen_ai.request.top_k"
    SEED = "gen_ai.request.seed"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    RESPONSE_ID = "gen_ai.response.id"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    ERROR_TYPE = "error.type"
    CHOICE = "tandem.choice"
    PATH = "tandem.path"
    ATTEMPTS = "tandem.attempts"
    UNCACHED_TOKENS = "tandem.uncached_tokens"
    # The predicted terms of the chosen candidate (docs/routing.md), of the last attempt.
    ROUTE_QUEUE = "tandem.route.queue_ms"
    ROUTE_PREFILL = "tandem.route.prefill_ms"
    ROUTE_TRANSFER = "tandem.route.transfer_ms"
    ROUTE_ROOM_WAIT = "tandem.route.room_wait_ms"
    ROUTE_GAP = "tandem.route.gap_ms"
    ROUTE_NUM_STREAMS = "tandem.route.num_streams"
    ROUTE_COST = "tandem.route.cost_ms"
    # From the arrival at the router, as predicted and as measured.
    PREDICTED_TTFT = "tandem.route.predicted_ttft_ms"
    TTFT = "tandem.route.ttft_ms"
    PREFILL_WORKER = "tandem.prefill_worker"
    DECODE_WORKER = "tandem.decode_worker"
    WORKER = "tandem.worker"
    TRANSFERRED_BYTES = "tandem.transfer.bytes"
    TRANSFER_EXPOSED_MS = "tandem.transfer.exposed_ms"


class JsonLinesExporter(SpanExporter):
    """Appends each span to a file as one JSON line. Several processes may share the file.

    Without room on the disk, spans are dropped, and a warning says so once until spans are written again.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written, because a failed export raises no error."""
        self._path = path
        self._lock = threading.Lock()
        self._separator = b""  # a newline after a torn line
        self._failing = False
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"[telemetry] trace_file: cannot write {path}: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(json.loads(span.to_json(indent=None))) + "\n" for span in spans)
        with self._lock:
            try:
                self._append(lines.encode())
            except OSError as error:
                if not self._failing:
                    _log.warning("cannot write traces to %s: %s. Spans are dropped.", self._path, error.strerror)
                self._failing = True
                return SpanExportResult.FAILURE
            self._failing = False
        return SpanExportResult.SUCCESS

    def _append(self, lines: bytes) -> None:
        """Raises `OSError` if the disk has no room for all lines."""
        # O_APPEND writes each line whole at the end, also while other processes write.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = self._separator + lines
            num_written = os.write(handle, content)
        finally:
            os.close(handle)
        if num_written < len(content):
            self._separator = b"\n"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._separator = b""


class Telemetry:
    """The tracer of a process. Without a collector and a trace file, no span is recorded."""

    def __init__(self, config: TelemetryConfig, service_name: str, instance_id: str = "") -> None:
        """`instance_id` tells services of one name apart. Raises `ConfigError` if the trace file cannot be written."""
        self.enabled = bool(config.otlp_endpoint or config.trace_file)
        attributes = {"service.name": service_name, "service.namespace": config.service_namespace}
        if instance_id:
            attributes["service.instance.id"] = instance_id
        resource = Resource.create(attributes)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if config.trace_file:
            self._export(JsonLinesExporter(Path(config.trace_file)))
        if config.otlp_endpoint:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            self._export(OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=True))
        self._tracer = self._provider.get_tracer("tandem")

    def _export(self, exporter: SpanExporter) -> None:
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))

    def start_root(self, headers: Mapping[str, str], start: float) -> Span:
        """Open the root span of a request, as a child of the client's span if the headers name one.

        Every time in this class is on the monotonic clock.
        """
        if not self.enabled:
            return trace.INVALID_SPAN
        parent = propagate.extract(headers)
        return self._tracer.start_span(
            SpanName.REQUEST.value, context=parent, kind=SpanKind.SERVER, start_time=_wall_ns(start)
        )

    def end_root(self, span: Span, end: float, attributes: Mapping[str, AttributeValue], error: str = "") -> None:
        span.set_attributes(dict(attributes))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_wall_ns(end))

    def record_span(
        self, name: SpanName, parent: Context, start: float, end: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        """Record a span that has ended."""
        if not self.enabled:
            return
        span = self._tracer.start_span(
            name.value, context=parent, start_time=_wall_ns(start), attributes=dict(attributes)
        )
        span.end(_wall_ns(end))

    def record_timeline(
        self,
        timeline: Timeline,
        names: Mapping[Stage, SpanName],
        parent: Context,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Record one span for each past stage of the timeline that has a name in `names`."""
        for stage, start, end in timeline.history:
            if stage in names:
                self.record_span(names[stage], parent, start, end, attributes)

    def close(self) -> None:
        """Export buffered spans, for at most `CLOSE_TIMEOUT_S`."""
        # Without an answer from the collector, shutdown retries for 10 s. The daemon thread ends with the process.
        closing = threading.Thread(target=self._provider.shutdown, name="telemetry", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def context_of(span: Span) -> Context:
    return trace.set_span_in_context(span)


def inject(span: Span) -> list[tuple[str, str]]:
    """gRPC metadata that makes the spans of the called service children of `span`."""
    headers: dict[str, str] = {}
    propagate.inject(headers, context=context_of(span))
    return list(headers.items())


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    return propagate.extract({key: value for key, value in metadata or () if isinstance(value, str)})


def trace_id_of(span: Span) -> str:
    """32 hex digits; empty for a span that is not recorded."""
    span_context = span.get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else ""


def _wall_ns(monotonic_s: float) -> int:
    """Wall-clock time of a monotonic time. Only spans carry wall-clock times."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
