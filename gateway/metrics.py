"""Metrics of the gateway, for Prometheus. `METRICS` lists every metric with its labels.

One gateway process has its own registry. Several processes share a directory (`PROMETHEUS_MULTIPROC_DIR`, which
gateway/processes.py sets for them before they import prometheus_client): any of them shows the sums of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SHARED_DIR = "PROMETHEUS_MULTIPROC_DIR"
DURATION_BUCKETS_S = tuple(0.001 * 2**i for i in range(20))  # 1 ms to 524 s
ADDED_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metric(Enum):
    REQUESTS = "tandem_gateway_requests_total"
    REQUEST_DURATION = "tandem_gateway_request_duration_seconds"
    ADDED_BEFORE = "tandem_gateway_added_before_seconds"
    ADDED_PER_MESSAGE = "tandem_gateway_added_per_message_seconds"
    OPEN_STREAMS = "tandem_gateway_open_streams"
    DISCONNECTS = "tandem_gateway_client_disconnects_total"


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Description:
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = DURATION_BUCKETS_S  # of a histogram


METRICS: dict[Metric, Description] = {
    Metric.REQUESTS: Description(
        Kind.COUNTER, "Ended HTTP requests, by route (other = no such route) and by status (499 = the client left)",
        ("route", "status"),
    ),
    Metric.REQUEST_DURATION: Description(
        Kind.HISTOGRAM, "Time from the head of an HTTP request to the last byte of its answer", ("route",)
    ),
    Metric.ADDED_BEFORE: Description(
        Kind.HISTOGRAM, "Time that the gateway adds before a call of the router: body, checks, conversion",
        buckets=ADDED_BUCKETS_S,
    ),
    Metric.ADDED_PER_MESSAGE: Description(
        Kind.HISTOGRAM, "Time that the gateway adds to a message of the router: conversion and writing, the mean of a "
        "request", buckets=ADDED_BUCKETS_S,
    ),
    Metric.OPEN_STREAMS: Description(Kind.GAUGE, "Answers that are being streamed"),
    Metric.DISCONNECTS: Description(Kind.COUNTER, "Requests whose client left before the end of the answer"),
}  # fmt: skip


class GatewayMetrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the start time of each series doubles the page, and no dashboard uses it
        self._registry = CollectorRegistry()
        made: dict[Metric, Any] = {metric: self._make(metric) for metric in Metric}
        self._requests, self._durations = made[Metric.REQUESTS], made[Metric.REQUEST_DURATION]
        self.added_before: Histogram = made[Metric.ADDED_BEFORE]
        self.added_per_message: Histogram = made[Metric.ADDED_PER_MESSAGE]
        self.open_streams: Gauge = made[Metric.OPEN_STREAMS]
        self.disconnects: Counter = made[Metric.DISCONNECTS]

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        about, registry = METRICS[metric], self._registry
        match about.kind:
            case Kind.COUNTER:
                return Counter(metric.value, about.text, about.labels, registry=registry)
            case Kind.GAUGE:
                return Gauge(metric.value, about.text, about.labels, registry=registry, multiprocess_mode="livesum")
            case Kind.HISTOGRAM:
                return Histogram(metric.value, about.text, about.labels, registry=registry, buckets=about.buckets)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    def page(self, others: Sequence[tuple[str, str]] = ()) -> str:
        """The page in Prometheus' text format. `others`: (address, page) of routers, appended."""
        registry = self._registry
        if os.environ.get(SHARED_DIR):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode() + joined(others)


def joined(pages: Sequence[tuple[str, str]]) -> str:
    """One page of several: samples of one family stand together, and have the label `router` if there are several."""
    if len(pages) <= 1:
        return "".join(page for _, page in pages)
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for address, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, address))
    return "".join("\n".join([*lines, *samples.get(family, ())]) + "\n" for family, lines in heads.items())


def _labelled(line: str, address: str) -> str:
    """`name{a="b"} 1` -> `name{router="host:port",a="b"} 1`."""
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{router="{address}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{router="{address}"}} {value}'
