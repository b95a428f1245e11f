"""Traces: one per request, exported whole at the end of the request.

The router and the gateway keep the spans of a request as plain records until the request ends. Then `Telemetry` decides
whether to export them (docs/adr/0036): a trace is exported if its head was sampled, if the request failed, or if it
took longer than `trace_slow_ms`. Workers return their stages to the router and export nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SynchronousMultiSpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from core.config import TelemetryConfig
from runtime.tracing.span_names import SpanName
from runtime.tracing.trace_context import TraceContext, new_span_id, start_trace
from runtime.tracing.trace_file import JsonLinesExporter

CLOSE_TIMEOUT_S = 1.0
EXPORT_DELAY_MS = 500.0  # a trace is exported at most this long after its end
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
PROJECT = "openinference.project.name"  # resource attribute: the project in which Phoenix shows a trace

AttributeValue = str | int | float | bool | Sequence[str]
_SCOPE = InstrumentationScope("tandem")


class SpanRecord(NamedTuple):
    """One span of a request. The first record of a request is its root. Times are on the monotonic clock."""

    name: SpanName
    service: str  # "tandem-router", "tandem-prefill-worker", ...
    process: str  # id of the process that measured the span
    start: float
    end: float
    attributes: Mapping[str, AttributeValue]
    error: str = ""
    parent: int = 0  # place of the parent among the records; of the root, unused


class Telemetry:
    """The exporters of a process. Without a collector and a trace file, no span is exported."""

    def __init__(self, config: TelemetryConfig, service: str, process: str = "") -> None:
        """`process` tells services of one name apart. Raises `ConfigError` if the trace file cannot be written."""
        self.service, self.process = service, process
        self.enabled = bool(config.otlp_endpoint or config.trace_file)
        self.config = config
        self._processor = SynchronousMultiSpanProcessor()
        if config.trace_file:
            self._add(JsonLinesExporter(Path(config.trace_file)))
        if config.otlp_endpoint:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            insecure = not config.otlp_endpoint.startswith("https://")
            # A collector elsewhere may need the proxy of http_proxy. One on this machine needs none.
            uses_proxy = urlsplit(config.otlp_endpoint).hostname not in LOCAL_HOSTS
            options: Any = (("grpc.enable_http_proxy", int(uses_proxy)),)
            self._add(OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure, channel_options=options))

    def _add(self, exporter: SpanExporter) -> None:
        self._processor.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))

    def start_trace(self, headers: Mapping[str, str]) -> TraceContext:
        """Continue the trace that the headers name, or start one."""
        return start_trace(headers, self.config.trace_sample_ratio)

    def keeps(self, trace: TraceContext, seconds: float, failed: bool) -> bool:
        """True if the trace of a request that has ended is exported."""
        slow = seconds * 1e3 >= self.config.trace_slow_ms
        return self.enabled and (trace.sampled or failed or slow)

    def export(self, trace: TraceContext, records: Sequence[SpanRecord]) -> None:
        """Export the spans of a request that has ended. Does not wait."""
        offset_s = time.time() - time.monotonic()
        contexts: list[SpanContext] = []
        for place, record in enumerate(records):
            contexts.append(_span_context(trace, new_span_id() if place else trace.span_id))
            if place:
                parent: SpanContext | None = contexts[record.parent]
            else:
                parent = _span_context(trace, trace.parent_id, is_remote=True) if trace.parent_id else None
            span = ReadableSpan(
                name=record.name.value,
                context=contexts[place],
                parent=parent,
                resource=_resource(self.config.service_namespace, record.service, record.process),
                attributes=dict(record.attributes),
                kind=SpanKind.INTERNAL if place else SpanKind.SERVER,
                status=Status(StatusCode.ERROR, record.error) if record.error else Status(StatusCode.UNSET),
                start_time=int((record.start + offset_s) * 1e9),
                end_time=int((record.end + offset_s) * 1e9),
                instrumentation_scope=_SCOPE,
            )
            self._processor.on_end(span)

    def close(self) -> None:
        """Export what waits, for at most `CLOSE_TIMEOUT_S`."""
        # Without an answer from the collector, shutdown retries for 10 s. The daemon thread ends with the process.
        closing = threading.Thread(target=self._processor.shutdown, name="telemetry", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def _span_context(trace: TraceContext, span_id: int, is_remote: bool = False) -> SpanContext:
    # An exported span has the flag, also if the head was not sampled.
    return SpanContext(trace.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), _state(trace.state))


@lru_cache(maxsize=64)
def _state(header: str) -> TraceState:
    return TraceState.from_header([header] if header else [])


@lru_cache(maxsize=1024)
def _resource(namespace: str, service: str, process: str) -> Resource:
    attributes = {"service.name": service, "service.namespace": namespace, PROJECT: namespace}
    return Resource.create(attributes | ({"service.instance.id": process} if process else {}))
