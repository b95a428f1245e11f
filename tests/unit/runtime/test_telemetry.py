"""Spans, lines of the log and metrics. A full disk or a silent collector costs spans only."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import http_attributes, url_attributes
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from core.config import TelemetryConfig
from core.plain_text import is_plain
from runtime.log_lines import FORMAT, MAX_CHARS, LogLines
from runtime.prometheus.metric_series import Buckets, Series
from runtime.prometheus.metrics import ALIASES, GATEWAY_METRICS, METRICS, ROUTER_METRICS, TYPES, Metric
from runtime.prometheus.metrics_page import Metrics, Reading, SharedPage
from runtime.tracing.span_names import Attribute, SpanName
from runtime.tracing.telemetry import SpanRecord, Telemetry
from runtime.tracing.trace_context import start_trace
from runtime.tracing.trace_file import JsonLinesExporter
from tests.support.limits import no_file_larger_than
from tests.support.waiting import until

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
        span: Any = tracer.start_span(name)
        span.end()
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


# ---- The metrics page: its content, and the names of metrics and attributes.


def constants(module: object) -> set[object]:
    return {value for name, value in vars(module).items() if name.isupper()}


ATTRIBUTES = constants(gen_ai_attributes) | constants(error_attributes)
# https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
OPENINFERENCE = {
    "openinference.span.kind", "llm.model_name", "llm.token_count.prompt", "llm.token_count.completion",
    "llm.token_count.total", "llm.token_count.prompt_details.cache_read",
}  # fmt: skip


def in_prometheus(name: object) -> str:
    return str(name).replace(".", "_")


@pytest.mark.parametrize("metric", Metric)
def test_every_metric_starts_with_tandem_or_is_a_semantic_convention(metric: Metric) -> None:
    names = {in_prometheus(name) for name in constants(gen_ai_metrics)}
    assert metric.value.startswith("tandem_") or metric.value.removesuffix("_seconds") in names
    labels = {label for label in METRICS[metric].labels if label.startswith(("gen_ai_", "error_"))}
    assert labels <= {in_prometheus(name) for name in ATTRIBUTES}


def test_every_attribute_starts_with_tandem_or_is_a_semantic_convention_and_no_two_have_one_name() -> None:
    names = [value for key, value in vars(Attribute).items() if key.isupper()]
    assert len(set(names)) == len(names)
    known = ATTRIBUTES | OPENINFERENCE | constants(http_attributes) | constants(url_attributes)
    assert {name for name in names if not name.startswith("tandem.")} <= known


def page(metrics: Metrics) -> dict[str, Family]:
    return {family.name: family for family in metrics.collect()}


def test_the_page_shows_only_present_workers_also_after_many_have_left() -> None:
    here, num_reads = list[str](), 0

    def read() -> Iterable[Reading]:
        nonlocal num_reads
        num_reads += 1
        return [(Metric.WORKER_RUNNING, 1.0, {"worker": name, "role": "decode"}) for name in here]

    metrics = Metrics(TelemetryConfig(), read)
    for start in range(50):
        here[:] = [f"decode-0.{start:016x}"]
        family = page(metrics)[Metric.WORKER_RUNNING.value]
        assert [sample.labels["worker"] for sample in family.samples] == here
    assert num_reads == 50, "a scrape reads once"


def test_the_page_is_text_that_a_parser_reads() -> None:
    names = {family.name for family in text_string_to_metric_families(Metrics(TelemetryConfig(), tuple).text())}
    assert {metric.value.removesuffix("_total") for metric in ROUTER_METRICS} <= names
    assert {name.removesuffix("_total") for name in ALIASES} <= names


def test_only_a_router_shows_its_process_and_no_port_is_opened_unasked() -> None:
    for table in (ROUTER_METRICS, GATEWAY_METRICS):
        metrics = Metrics(TelemetryConfig(), tuple, table)
        assert ("process_resident_memory_bytes" in metrics.text()) == (table is ROUTER_METRICS)
        assert metrics._server is None


def test_an_alias_has_the_numbers_of_its_source_with_its_own_labels() -> None:
    running = [
        (Metric.WORKER_RUNNING, 2.0, {"worker": "d-0", "role": "decode"}),
        (Metric.WORKER_RUNNING, 3.0, {"worker": "d-1", "role": "decode"}),
    ]
    metrics = Metrics(TelemetryConfig(), lambda: running)
    metrics.model = "smol"
    for path, end in (("local", "stop"), ("disaggregated", "stop"), ("local", "length"), ("none", "cancelled")):
        metrics.record(Metric.REQUESTS, 1, path=path, end=end)
    metrics.record(Metric.PHASE_DURATION, 0.5, phase="prefill")
    metrics.record(Metric.PHASE_DURATION, 8.0, phase="decode")
    found = page(metrics)
    ended = {(sample.labels["model_name"], sample.labels["finished_reason"]): sample.value
             for sample in found["vllm:request_success"].samples}  # fmt: skip
    assert ended == {("smol", "stop"): 2, ("smol", "length"): 1}
    engines = {sample.labels["engine"]: sample.value for sample in found["vllm:num_requests_running"].samples}
    assert engines == {"d-0": 2, "d-1": 3}
    sums = [s.value for s in found["vllm:request_prefill_time_seconds"].samples if s.name.endswith("_sum")]
    assert sums == [0.5]


def test_the_aliases_are_names_of_vllm_with_labels_of_their_source_and_begin_at_zero_without_labels() -> None:
    found = page(Metrics(TelemetryConfig(), lambda: ()))
    for name, alias in ALIASES.items():
        samples, about = found[name.removesuffix("_total")].samples, METRICS[alias.source]
        assert all(sample.value == 0.0 for sample in samples)
        assert bool(samples) == (not alias.labels)
        assert name.startswith("vllm:")
        assert {*alias.only, *alias.labels.values()} <= set(about.labels)
        assert name.endswith("_total") == (TYPES[about.kind] == "counter")


# ---- Histograms and counters: values in buckets, and series by label.


def test_a_bucket_includes_its_upper_end() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.observe(value)
    assert buckets.counts == [2, 2, 1]
    assert buckets.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert (buckets.total, buckets.num_values) == (14.0, 5)


def test_adding_a_histogram_changes_only_the_sum() -> None:
    one, other = Buckets((1.0,), (1, 2), 5.0), Buckets((1.0,), (3,), 0.5)
    one.add(other)
    assert (one.counts, one.total) == ([4, 2], 5.5)
    assert (other.counts, other.total) == ([3, 0], 0.5)


def test_a_series_without_labels_is_there_from_the_start() -> None:
    assert Series((), None).snapshot() == [((), 0.0)]
    ((labels, empty),) = Series((), (1.0,)).snapshot()
    assert isinstance(empty, Buckets)
    assert (labels, empty.num_values) == ((), 0)


def test_each_combination_of_labels_is_counted_apart() -> None:
    series = Series(("tenant",), None)
    for labels in (("a",), ("b",), ("a",)):
        series.add(labels, 2.0)
    assert dict(series.snapshot()) == {("a",): 4.0, ("b",): 2.0}


def test_a_scrape_copies_series_while_others_are_added() -> None:
    """A collection of garbage, which the tuples of the copy can begin, may let another thread run."""
    series, names = Series(("a",), None), map(str, itertools.count())
    for name in itertools.islice(names, 50):
        series.add((name,), 1)

    def add(*_: object) -> None:
        series.add((next(names),), 1)

    thresholds = gc.get_threshold()
    gc.callbacks.append(add)
    try:
        gc.set_threshold(1)
        snapshot = series.snapshot()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(add)
    assert len(series.values) > 50, "a collection ran meanwhile"
    assert {f"{number}" for number in range(50)} <= {labels[0] for labels, _ in snapshot}


async def test_callers_who_come_while_a_page_is_made_share_the_next_one() -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def make() -> str:
        begun.append(len(begun))
        may_end.wait(10.0)
        return str(begun[-1])

    page = SharedPage(make)
    first = asyncio.create_task(page.text())
    await until(lambda: bool(begun), "the first page is begun")
    later = [asyncio.create_task(page.text()) for _ in range(50)]
    await asyncio.sleep(0)
    later[0].cancel()
    assert len(begun) == 1
    may_end.set()
    assert await first == "0"
    assert await asyncio.gather(*later[1:]) == ["1"] * 49
    assert await page.text() == "2", "no page is older than its call"
