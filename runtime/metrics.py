"""Metrics of a router and its fleet, for Prometheus. Every name stands in `METRICS`, and nowhere else.

The router is the one page to scrape: what workers report to it is shown here by worker. Names and units follow
OpenTelemetry's semantic conventions for generative AI where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import REGISTRY, start_http_server

from core.config import TelemetryConfig
from core.errors import ConfigError


class Metric(Enum):
    REQUESTS = "tandem.requests"
    TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
    TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
    REQUEST_DURATION = "gen_ai.server.request.duration"
    TOKENS = "tandem.tokens"
    TRANSFERRED_BYTES = "tandem.transfer.bytes"
    PATH_BANDWIDTH = "tandem.transfer.path_bandwidth"
    PATH_LATENCY = "tandem.transfer.path_latency"
    PATHS = "tandem.transfer.paths"
    QUEUED = "tandem.router.queued"
    IN_FLIGHT = "tandem.router.in_flight"
    WORKER_BLOCKS = "tandem.worker.blocks"
    WORKER_RUNNING = "tandem.worker.running"
    WORKER_QUEUED_TOKENS = "tandem.worker.queued_tokens"
    WORKER_TRANSFERS = "tandem.worker.transfers"
    WORKER_TRANSFERRED_BYTES = "tandem.worker.transferred_bytes"
    WORKER_TRANSFER_SECONDS = "tandem.worker.transfer_seconds"
    WORKER_EXPIRED_LEASES = "tandem.worker.expired_leases"
    WORKER_PREEMPTIONS = "tandem.worker.preemptions"
    WORKER_MALFORMED_MESSAGES = "tandem.worker.malformed_messages"
    WORKER_DROPPED_MESSAGES = "tandem.worker.dropped_messages"


# metric -> (unit, what it says)
METRICS: dict[Metric, tuple[str, str]] = {
    Metric.REQUESTS: ("{request}", "Choices that ended, by path and by how they ended"),
    Metric.TIME_TO_FIRST_TOKEN: ("s", "From a request's arrival at the router to its first token"),
    Metric.TIME_PER_OUTPUT_TOKEN: ("s", "(last token - first token) / (tokens - 1)"),
    Metric.REQUEST_DURATION: ("s", "From a request's arrival at the router to its end"),
    Metric.TOKENS: ("{token}", "Tokens served, by kind: prompt, cached (part of prompt) or output"),
    Metric.TRANSFERRED_BYTES: ("By", "KV bytes that moved from prefill to decode workers"),
    Metric.PATH_BANDWIDTH: (
        "By/s",
        "Measured speed of the path from a peer to a worker that reads, by its lane",
    ),
    Metric.PATH_LATENCY: ("s", "Shortest way there and back of a notification on that path"),
    Metric.PATHS: ("{path}", "Paths of a worker, by state; slow, fallback, unreachable and refused are worth an alert"),
    Metric.QUEUED: ("{request}", "Requests waiting in the router for a worker"),
    Metric.IN_FLIGHT: ("{request}", "Requests dispatched and not ended"),
    Metric.WORKER_BLOCKS: ("{block}", "KV blocks of a worker, by column of its ledger"),
    Metric.WORKER_RUNNING: ("{sequence}", "Sequences in a worker's steps"),
    Metric.WORKER_QUEUED_TOKENS: ("{token}", "Tokens to compute before every sequence of a worker is in decode"),
    Metric.WORKER_TRANSFERS: ("{transfer}", "Hand-offs alive on a worker, by state; one side is offer or pull"),
    Metric.WORKER_TRANSFERRED_BYTES: ("By", "KV bytes a worker has pulled, since its start"),
    Metric.WORKER_TRANSFER_SECONDS: ("s", "Time in which a worker's pulls had reads in flight, since its start"),
    Metric.WORKER_EXPIRED_LEASES: ("{lease}", "Offers of a worker whose reader fell silent, since its start"),
    Metric.WORKER_PREEMPTIONS: ("{sequence}", "Sequences a worker preempted, since its start"),
    Metric.WORKER_MALFORMED_MESSAGES: ("{message}", "Notifications to a worker that were no message, since its start"),
    Metric.WORKER_DROPPED_MESSAGES: ("{message}", "Late, doubled and foreign messages to a worker, since its start"),
}

HISTOGRAMS = (Metric.TIME_TO_FIRST_TOKEN, Metric.TIME_PER_OUTPUT_TOKEN, Metric.REQUEST_DURATION)
COUNTERS = (Metric.REQUESTS, Metric.TOKENS, Metric.TRANSFERRED_BYTES)
BUCKETS_S = [0.001 * 2**i for i in range(18)]  # 1 ms to 131 s

# What is read at each scrape: (metric, value, labels).
Reading = tuple[Metric, float, Mapping[str, str]]


class Metrics:
    """`read` is called at each scrape, on the scraper's thread. Without a port nothing is recorded."""

    def __init__(self, config: TelemetryConfig, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read
        self._instruments: dict[Metric, Any] = {}
        self._server: Any = None
        self._provider: MeterProvider | None = None
        if config.metrics_port:
            self._start(config.metrics_port)

    def _start(self, port: int) -> None:
        try:
            self._server, _ = start_http_server(port, registry=REGISTRY)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on port {port}: {error.strerror}; choose another one") from error
        buckets = ExplicitBucketHistogramAggregation(BUCKETS_S)
        views = [View(instrument_name=metric.value, aggregation=buckets) for metric in HISTOGRAMS]
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader()], views=views)
        meter = self._provider.get_meter("tandem")
        for metric, (unit, description) in METRICS.items():
            if metric in HISTOGRAMS:
                self._instruments[metric] = meter.create_histogram(metric.value, unit, description)
            elif metric in COUNTERS:
                self._instruments[metric] = meter.create_counter(metric.value, unit, description)
            else:
                meter.create_observable_gauge(metric.value, [self._observer(metric)], unit, description)

    def _observer(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for read, value, labels in self._read() if read is metric]

        return observe

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Add to a counter or a histogram."""
        instrument = self._instruments.get(metric)
        if instrument is None:
            return
        if metric in HISTOGRAMS:
            instrument.record(value, labels)
        else:
            instrument.add(value, labels)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
            self._server.shutdown()
            self._server.server_close()
