"""Dashboards and rules ask for metrics that exist, by labels that they have. The dashboards draw every metric."""

from __future__ import annotations

import json
import re
from collections import Counter

from runtime.prometheus.metrics import METRICS, ROUTER_METRICS, Kind, Metric
from tests.support.observability import BOARDS, rules, targets

HISTOGRAMS = (Kind.HISTOGRAM, Kind.DISTRIBUTION)
TARGETS = list(targets())
RULES = [(rule["expr"], rule.get("record", rule.get("alert"))) for rule in rules()]
NAME = re.compile(r"(?<![\w:])(?:tandem|gen_ai)_\w+")
SELECTED = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")
GROUPED = re.compile(r"by \(([^)]*)\)")


def metric_of(name: str) -> Metric:
    for metric, about in METRICS.items():
        if name == (f"{metric.value}_bucket" if about.kind in HISTOGRAMS else metric.value):
            return metric
    raise AssertionError(f"{name} is on no page")


def check_labels(expression: str) -> list[set[str]]:
    """The labels of each group, from the outside in."""
    metrics = [metric_of(name) for name in NAME.findall(expression)]
    groups = [{label.strip() for label in group.split(",")} for group in GROUPED.findall(expression)]
    for metric in metrics:
        labels = set(METRICS[metric].labels)
        used = {*SELECTED.findall(expression), *(label for group in groups for label in group)}
        assert used <= labels | {"le"}, f"{metric.value} has no labels {used - labels}"
    return groups


def test_what_is_drawn_is_on_the_page() -> None:
    for target in TARGETS:
        assert NAME.search(target.expression), target
        groups = check_labels(target.expression)
        assert set(re.findall(r"{{(\w+)}}", target.legend)) <= (groups[0] if groups else set()), target


def test_what_a_rule_reads_is_on_the_page_or_recorded() -> None:
    recorded = {name for _, name in RULES}
    for expression, name in RULES:
        assert set(re.findall(r"\b\w+:\w+:\w+", expression)) <= recorded, name
        if not re.search(r"\w:\w|\bup\b", expression):
            assert NAME.search(expression), name
            check_labels(expression)


def test_with_several_routers_the_report_of_a_worker_counts_once() -> None:
    """Every router has the reports of every worker on its page."""
    for expression in [*(target.expression for target in TARGETS), *(expression for expression, _ in RULES)]:
        for name in NAME.findall(expression):
            if "worker" in METRICS[metric_of(name)].labels:
                once = rf"max by \([^)]*\bworker\b[^)]*\) \((rate\(|increase\()?{name}\b"
                assert re.search(once, expression), expression


def test_every_metric_is_drawn() -> None:
    assert {metric_of(name) for target in TARGETS for name in NAME.findall(target.expression)} == set(ROUTER_METRICS)


def test_boards_and_panels_can_be_told_apart_and_do_not_overlap() -> None:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in BOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
        places = Counter((panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"])
        assert max(places.values()) == 1


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert len(rule["annotations"]["summary"]) > 20, rule["alert"]
            assert len(rule["annotations"]["action"]) > 20, rule["alert"]
