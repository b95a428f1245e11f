"""Metrics of a router and its fleet, for Prometheus. `METRICS` lists every metric with its labels.

Only routers have a metrics page, each its own, also with what each worker reports to the router. So with several
routers a value of a worker is on several pages; the counts of requests add up. Names and units follow OpenTelemetry's
semantic conventions for generative AI, in the spelling of Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.process_collector import ProcessCollector

from core.config import TelemetryConfig
from core.errors import ConfigError

BUCKETS_S = tuple(0.001 * 2**i for i in range(20))  # 1 ms to 524 s
RATIO_BUCKETS = (0.2, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.25, 1.5, 2.0, 5.0)


class Metric(Enum):
    REQUESTS = "tandem_requests_total"
    TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
    REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
    TTFT_PREDICTION_RATIO = "tandem_router_ttft_prediction_ratio"
    PHASE_DURATION = "tandem_phase_duration_seconds"
    TOKENS = "tandem_tokens_total"
    PATH_BANDWIDTH = "tandem_transfer_path_bandwidth_bytes_per_second"
    PATH_LATENCY = "tandem_transfer_path_latency_seconds"
    PATHS = "tandem_transfer_paths"
    QUEUED = "tandem_router_queued"
    IN_FLIGHT = "tandem_router_in_flight"
    WORKER_BLOCKS = "tandem_worker_blocks"
    WORKER_RUNNING = "tandem_worker_running"
    WORKER_QUEUED_TOKENS = "tandem_worker_queued_tokens"
    WORKER_PROMPT_SECONDS = "tandem_worker_prompt_seconds"
    WORKER_STEP_SECONDS = "tandem_worker_step_seconds"
    WORKER_TRANSFERS = "tandem_worker_transfers"
    WORKER_TRANSFERRED_BYTES = "tandem_worker_transferred_bytes_total"
    WORKER_TRANSFER_SECONDS = "tandem_worker_transfer_seconds_total"
    WORKER_EXPIRED_LEASES = "tandem_worker_expired_leases_total"
    WORKER_PREEMPTIONS = "tandem_worker_preemptions_total"
    WORKER_MALFORMED_MESSAGES = "tandem_worker_malformed_messages_total"
    WORKER_DROPPED_MESSAGES = "tandem_worker_dropped_messages_total"
    WORKER_CORRUPT_BLOCKS = "tandem_worker_corrupt_blocks_total"


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    # Read at each scrape, so the page shows only workers that are in the fleet.
    GAUGE = "gauge"
    TOTAL = "total"  # a counter that a worker keeps


@dataclass(frozen=True, slots=True)
class Description:
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS_S  # of a histogram


REQUEST = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
WORKER = ("worker", "role")
PATH = ("worker", "peer", "lane")

METRICS: dict[Metric, Description] = {
    Metric.REQUESTS: Description(
        Kind.COUNTER, "Ended choices, by path (none if refused or failed) and by end",
        ("path", "end"),
    ),
    Metric.TIME_TO_FIRST_TOKEN: Description(
        Kind.HISTOGRAM, "Time from the arrival of a request at the router to its first token", REQUEST
    ),
    Metric.TIME_PER_OUTPUT_TOKEN: Description(Kind.HISTOGRAM, "(last token - first token) / (tokens - 1)", REQUEST),
    Metric.REQUEST_DURATION: Description(
        Kind.HISTOGRAM, "Time from the arrival of a request at the router to its end; error_type is empty on success",
        (*REQUEST, "error_type"),
    ),
    Metric.TTFT_PREDICTION_RATIO: Description(
        Kind.HISTOGRAM, "Measured / predicted time to first token, of requests with one attempt",
        ("path",), RATIO_BUCKETS,
    ),
    Metric.PHASE_DURATION: Description(
        Kind.HISTOGRAM, "Duration of each phase of a choice (PhaseTimings of protos/inference.proto)", ("phase",)
    ),
    Metric.TOKENS: Description(
        Kind.COUNTER, "Tokens served, by kind: prompt, cached (part of prompt) or output", ("kind",)
    ),
    Metric.PATH_BANDWIDTH: Description(
        Kind.GAUGE, "Measured bandwidth of the path from a peer to the reading worker, by lane", PATH
    ),
    Metric.PATH_LATENCY: Description(Kind.GAUGE, "Shortest round trip of a notification on the path", PATH),
    Metric.PATHS: Description(
        Kind.GAUGE, "Paths of a worker, by state; alert on slow, fallback, unreachable and refused",
        ("worker", "state"),
    ),
    Metric.QUEUED: Description(Kind.GAUGE, "Requests that wait in the router for a worker"),
    Metric.IN_FLIGHT: Description(Kind.GAUGE, "Dispatched requests that have not ended"),
    Metric.WORKER_BLOCKS: Description(
        Kind.GAUGE, "KV blocks of a worker, by column of its ledger", (*WORKER, "column")
    ),
    Metric.WORKER_RUNNING: Description(Kind.GAUGE, "Running sequences of a worker", WORKER),
    Metric.WORKER_QUEUED_TOKENS: Description(
        Kind.GAUGE, "Tokens that a worker must compute until each of its sequences is in decode", WORKER
    ),
    Metric.WORKER_PROMPT_SECONDS: Description(
        Kind.GAUGE, "Predicted time of the prompts that a worker has to compute", WORKER
    ),
    Metric.WORKER_STEP_SECONDS: Description(
        Kind.GAUGE, "Predicted time of a step of a worker with its sequences in decode and no prompt", WORKER
    ),
    Metric.WORKER_TRANSFERS: Description(
        Kind.GAUGE, "Open hand-offs of a worker, by side (offer or pull) and state", (*WORKER, "side", "state")
    ),
    Metric.WORKER_TRANSFERRED_BYTES: Description(Kind.TOTAL, "KV bytes that a worker has pulled", WORKER),
    Metric.WORKER_TRANSFER_SECONDS: Description(
        Kind.TOTAL, "Time during which the pulls of a worker had reads in flight", WORKER
    ),
    Metric.WORKER_EXPIRED_LEASES: Description(Kind.TOTAL, "Offers of a worker that expired", WORKER),
    Metric.WORKER_PREEMPTIONS: Description(Kind.TOTAL, "Sequences that a worker has preempted", WORKER),
    Metric.WORKER_MALFORMED_MESSAGES: Description(
        Kind.TOTAL, "Notifications that a worker could not decode", WORKER
    ),
    Metric.WORKER_DROPPED_MESSAGES: Description(
        Kind.TOTAL, "Messages that a worker dropped: late, duplicate, or of an unknown transfer", WORKER
    ),
    Metric.WORKER_CORRUPT_BLOCKS: Description(
        Kind.TOTAL, "Blocks with a wrong digest after a read", WORKER,
    ),
}  # fmt: skip

Reading = tuple[Metric, float, Mapping[str, str]]  # (metric, value, labels)


class Metrics:
    """Calls `read` at each scrape, in the thread of the scrape. Without a port, nothing is recorded."""

    def __init__(self, config: TelemetryConfig, read: Callable[[], Iterable[Reading]]) -> None:
        """Raises `ConfigError` if the port is taken."""
        self._read = read
        self._recorded: dict[Metric, Counter | Histogram] = {}
        self._server: Any = None
        if config.metrics_port:
            self._start(config.metrics_port)

    def _start(self, port: int) -> None:
        disable_created_metrics()  # the start time of each series doubles the page, and no dashboard uses it
        registry = CollectorRegistry()
        try:
            self._server, _ = start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on port {port}: {error.strerror}; choose another port") from error
        ProcessCollector(registry=registry)
        for metric, about in METRICS.items():
            if about.kind is Kind.COUNTER:
                self._recorded[metric] = Counter(metric.value, about.text, about.labels, registry=registry)
            elif about.kind is Kind.HISTOGRAM:
                self._recorded[metric] = Histogram(
                    metric.value, about.text, about.labels, registry=registry, buckets=about.buckets
                )
        registry.register(self)  # type: ignore[arg-type]  # the registry calls only `collect`

    def collect(self) -> Iterator[Family]:
        """The metrics that `read` returns. The registry calls this at each scrape."""
        family_types = {Kind.GAUGE: GaugeMetricFamily, Kind.TOTAL: CounterMetricFamily}
        families: dict[Metric, Any] = {
            metric: family_types[about.kind](metric.value, about.text, labels=about.labels)
            for metric, about in METRICS.items()
            if about.kind in family_types
        }
        for metric, value, labels in self._read():
            families[metric].add_metric([labels[name] for name in METRICS[metric].labels], value)
        yield from families.values()

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Add to a counter or a histogram."""
        recorded = self._recorded.get(metric)
        if recorded is None:
            return
        series = recorded.labels(**labels) if labels else recorded
        if isinstance(series, Counter):
            series.inc(value)
        else:
            series.observe(value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
