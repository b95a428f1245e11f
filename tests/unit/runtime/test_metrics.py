"""The metrics page: its content, and the names of metrics and attributes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from prometheus_client.core import Metric as Family

from core.config import TelemetryConfig
from runtime.metrics import METRICS, Kind, Metric
from runtime.metrics_page import Metrics, Reading


def constants(module: object) -> set[object]:
    return {value for name, value in vars(module).items() if name.isupper()}


ATTRIBUTES = constants(gen_ai_attributes) | constants(error_attributes)


def in_prometheus(name: object) -> str:
    return str(name).replace(".", "_")


@pytest.mark.parametrize("metric", Metric)
def test_every_metric_starts_with_tandem_or_is_a_semantic_convention(metric: Metric) -> None:
    names = {in_prometheus(name) for name in constants(gen_ai_metrics)}
    assert metric.value.startswith("tandem_") or metric.value.removesuffix("_seconds") in names
    labels = {label for label in METRICS[metric].labels if label.startswith(("gen_ai_", "error_"))}
    assert labels <= {in_prometheus(name) for name in ATTRIBUTES}


@pytest.mark.parametrize("metric", Metric)
def test_exactly_the_counters_have_names_that_end_in_total(metric: Metric) -> None:
    grows = METRICS[metric].kind in (Kind.COUNTER, Kind.TOTAL)
    assert metric.value.endswith("_total") == grows


def page(metrics: Metrics) -> dict[str, Family]:
    return {family.name: family for family in metrics.collect()}


def test_the_page_shows_only_present_workers_also_after_thousands_have_left() -> None:
    here: list[str] = []

    def read() -> Iterable[Reading]:
        return [(Metric.WORKER_RUNNING, 1.0, {"worker": name, "role": "decode"}) for name in here]

    metrics = Metrics(TelemetryConfig(), read)
    for start in range(3000):
        here[:] = [f"decode-0.{start:016x}"]
        family = page(metrics)[Metric.WORKER_RUNNING.value]
        assert [sample.labels["worker"] for sample in family.samples] == here


def test_a_scrape_reads_once() -> None:
    num_reads = 0

    def read() -> Iterable[Reading]:
        nonlocal num_reads
        num_reads += 1
        return ()

    assert page(Metrics(TelemetryConfig(), read))
    assert num_reads == 1
