"""A full disk costs spans only. A collector without an answer does not delay the end."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from core.config import TelemetryConfig
from runtime.tracing.span_names import SpanName
from runtime.tracing.telemetry import SpanRecord, Telemetry
from runtime.tracing.trace_file import JsonLinesExporter
from tests.support.limits import no_file_larger_than

PATIENCE_S = 10.0


def test_a_span_names_the_instance_of_its_service(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    telemetry = Telemetry(TelemetryConfig(trace_file=str(file)), "tandem-router", "router-1.0badcafe")
    record = SpanRecord(SpanName.REQUEST, "tandem-router", "router-1.0badcafe", 0.0, 1.0, {})
    telemetry.export(telemetry.start_trace({}), [record])
    telemetry.close()
    attributes = json.loads(file.read_text())["resource"]["attributes"]
    assert attributes["service.name"] == "tandem-router"
    assert attributes["service.instance.id"] == "router-1.0badcafe"


def test_a_full_disk_costs_spans_and_one_warning_and_tears_no_later_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "spans.jsonl"
    exporter, tracer = JsonLinesExporter(file), TracerProvider(shutdown_on_exit=False).get_tracer("test")

    def export(name: str) -> SpanExportResult:
        span = tracer.start_span(name)
        span.end()
        assert isinstance(span, ReadableSpan)
        return exporter.export([span])

    assert export("before") is SpanExportResult.SUCCESS
    with no_file_larger_than(file.stat().st_size + 10):
        assert export("torn") is SpanExportResult.FAILURE
        assert export("dropped") is SpanExportResult.FAILURE
    assert [export("after"), export("last")] == [SpanExportResult.SUCCESS] * 2
    (warning,) = caplog.messages
    assert warning == f"cannot write traces to {file}: No space left on device. Spans are dropped."
    before, torn, after, last = file.read_text().splitlines()
    assert [json.loads(line)["name"] for line in (before, after, last)] == ["before", "after", "last"]
    assert len(torn) == 10


def test_a_collector_on_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    exported = threading.Event()

    def export(_: bytes, __: grpc.ServicerContext) -> bytes:
        exported.set()
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    telemetry = Telemetry(TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}"), "tandem-router")
    telemetry.export(telemetry.start_trace({}), [SpanRecord(SpanName.REQUEST, "a", "b", 0.0, 1.0, {})])
    assert exported.wait(PATIENCE_S)
    telemetry.close()
    server.stop(None)


class StuckProvider:
    """Its shutdown waits, like that of an exporter whose collector does not answer."""

    def __init__(self) -> None:
        self.answered, self.ended = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.answered.wait(PATIENCE_S)
        self.ended.set()


def test_close_does_not_wait_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tracing.telemetry.CLOSE_TIMEOUT_S", 0.01)
    telemetry, stuck = Telemetry(TelemetryConfig(), "tandem-test"), StuckProvider()
    telemetry._processor = stuck  # type: ignore[assignment]
    telemetry.close()
    assert not stuck.ended.is_set(), "close waited for the shutdown"
    stuck.answered.set()
    assert stuck.ended.wait(PATIENCE_S), "the shutdown was abandoned"
