"""The dashboard asks for metrics that exist, by labels that they have, and leaves none of them out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.metrics import METRICS, Kind, Metric

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy/grafana.json").read_text(encoding="utf-8"))
TARGETS = [(target["expr"], target["legendFormat"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"\b(?:tandem|gen_ai)_\w+")
SELECTED = re.compile(r"{(\w+)=")
GROUPED = re.compile(r"by \(([^)]*)\)")


def metric_of(name: str) -> Metric:
    for metric, about in METRICS.items():
        if name == (f"{metric.value}_bucket" if about.kind is Kind.HISTOGRAM else metric.value):
            return metric
    raise AssertionError(f"{name} is on no page")


@pytest.mark.parametrize(("expression", "legend"), TARGETS)
def test_what_is_drawn_is_on_the_page(expression: str, legend: str) -> None:
    metrics = [metric_of(name) for name in NAME.findall(expression)]
    assert metrics
    groups = [{label.strip() for label in group.split(",")} for group in GROUPED.findall(expression)]
    for metric in metrics:
        labels = set(METRICS[metric].labels)
        assert {*SELECTED.findall(expression), *(label for group in groups for label in group)} <= labels | {"le"}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= (groups[0] if groups else labels)


@pytest.mark.parametrize("expression", [expression for expression, _ in TARGETS])
def test_with_several_routers_the_report_of_a_worker_is_drawn_once(expression: str) -> None:
    """Every router has the reports of every worker on its page."""
    for name in NAME.findall(expression):
        if name.startswith(("tandem_worker_", "tandem_transfer_")):
            assert re.search(rf"max by \([^)]*\bworker\b[^)]*\) \((rate\()?{name}\b", expression)


def test_every_metric_is_drawn() -> None:
    assert {metric_of(name) for expression, _ in TARGETS for name in NAME.findall(expression)} == set(Metric)
