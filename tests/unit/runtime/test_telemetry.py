"""A full disk costs spans only, a collector without an answer does not delay the end, and a record is a line."""

from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from core.config import TelemetryConfig
from core.plain_text import is_plain
from runtime.log_lines import FORMAT, MAX_CHARS, LogLines
from runtime.tracing.span_names import SpanName
from runtime.tracing.telemetry import SpanRecord, Telemetry
from runtime.tracing.trace_context import start_trace
from runtime.tracing.trace_file import JsonLinesExporter
from tests.support.limits import no_file_larger_than

PATIENCE_S = 10.0


def test_a_span_has_its_length_and_names_the_instance_of_its_service(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    telemetry = Telemetry(TelemetryConfig(trace_file=str(file)), "tandem-router", "router-1.0badcafe")
    record = SpanRecord(SpanName.REQUEST, "tandem-router", "router-1.0badcafe", 0.0, 1.0, {})
    assert telemetry.enabled
    telemetry.export(telemetry.start_trace({}), [record])
    telemetry.close()
    span = json.loads(file.read_text())
    start, end = (datetime.fromisoformat(span[name]) for name in ("start_time", "end_time"))
    assert end - start == timedelta(seconds=1)
    attributes = span["resource"]["attributes"]
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
    assert file.resolve() not in {Path(f"/proc/self/fd/{number}").resolve() for number in os.listdir("/proc/self/fd")}


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


# ---- W3C Trace Context: which headers continue a trace, and which head is sampled.

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_traceparent_is_continued_with_its_decision_whatever_the_ratio() -> None:
    for flags, sampled, ratio in (("01", True, 0.0), ("00", False, 1.0), ("03", True, 0.0)):
        trace = start_trace({"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "tracestate": "a=b"}, ratio)
        assert (trace.trace_id_hex, trace.parent_id, trace.sampled) == (TRACE_ID, int(SPAN_ID, 16), sampled)
        parent = f"00-{TRACE_ID}-{trace.span_id:016x}-{'01' if sampled else '00'}"
        assert trace.headers() == [("traceparent", parent), ("tracestate", "a=b")]
    later = start_trace({"traceparent": f"01-{TRACE_ID}-{SPAN_ID}-01-more"}, 1.0)
    assert later.trace_id_hex == TRACE_ID, "a later version may have more fields"


@pytest.mark.parametrize(
    "header",
    [
        "", "nonsense", f"00-{TRACE_ID}-{SPAN_ID}", f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01", f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-01-more",
    ],
)  # fmt: skip
def test_an_invalid_traceparent_starts_a_new_trace(header: str) -> None:
    trace = start_trace({"traceparent": header}, 1.0)
    assert trace.trace_id_hex != TRACE_ID
    assert trace.parent_id == 0
    assert trace.sampled


def test_the_ratio_decides_by_the_trace_id() -> None:
    traces = [start_trace({}, 0.25) for _ in range(2000)]
    assert 400 < sum(trace.sampled for trace in traces) < 600
    assert not any(start_trace({}, 0.0).sampled for _ in range(100))
    for trace in traces:
        assert trace.sampled == (trace.trace_id % 2**64 < 2**62)


# ---- A record of the log is one line of its own, whatever a client put into it.


def line_of(message: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return LogLines(FORMAT).format(logging.LogRecord("gateway", logging.ERROR, "", 0, "failed: %s", (message,), info))


def test_a_text_of_a_client_is_neither_obeyed_nor_a_record() -> None:
    forged = "a\n2026-01-01 00:00:00,000 INFO router: all is well\x1b[2J"
    for found in (line_of(forged), line_of("", ValueError(forged))):
        first, *others = found.split("\n")
        assert "ERROR gateway: failed" in first
        assert others
        assert all(line.startswith("  ") for line in others)
        assert all(is_plain(line) for line in (first, *others))
        assert "\\x1b[2J" in found


def test_a_long_record_keeps_its_start_and_its_end() -> None:
    found = line_of("a" * MAX_CHARS + "b" * MAX_CHARS)
    assert len(found) < MAX_CHARS + 100
    assert "failed: aaa" in found
    assert found.endswith("bbb")
