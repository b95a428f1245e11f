"""Predicted and measured time to first token are on the span of a request and in a metric; so are the route's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from core.config import RouterConfig
from core.errors import QueueFull
from core.lifecycle import FinishReason, RequestPath, Stage, Timeline
from core.request import Request, SamplingParams
from router.operations.request_metrics import RequestMetrics
from router.operations.request_spans import route_attributes
from router.requests.events import Fail, Finish, Outcome
from router.routing.policy import Candidate
from router.serving.choice_stream import ChoiceStream
from runtime.prometheus.metrics import RATIO_BUCKETS, Metric
from runtime.prometheus.metrics_page import Metrics

CANDIDATE = Candidate(
    "prefill-0", "decode-0", cached_tokens=64, uncached_tokens=16, transfer_blocks=5, num_dispatched=0, queue_s=0.1,
    prefill_s=0.2, transfer_s=0.04, room_wait_s=0.3, gap_s=0.002, num_streams=3,
)  # fmt: skip


OUTCOME = Outcome(
    finish_reason=FinishReason.LENGTH, num_prompt_tokens=80, num_output_tokens=4, cached_tokens=64,
    path=RequestPath.DISAGGREGATED, attempts=1, timeline=Timeline(Stage.DECODE, 11.25), candidate=CANDIDATE,
    first_token_s=1.25, predicted_first_token_s=1.0, prefill=None, decode=None,
)  # fmt: skip


class Recording:
    """Metrics that keep what is recorded."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Metric, float, dict[str, str]]] = []

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        self.recorded.append((metric, value, labels))


def ratios_of(result: Finish | Fail) -> list[tuple[float, dict[str, str]]]:
    request = Request("r", (1,), 1, SamplingParams(max_tokens=4))
    stream = ChoiceStream(
        0, "model", "chat", request, "r", 10.0, cast(Any, None), cast(Any, None), lambda: None, cast(Any, None)
    )
    metrics = Recording()
    RequestMetrics(cast(Metrics, metrics), RouterConfig()).ended(stream, result, 12.0)
    return [(value, labels) for metric, value, labels in metrics.recorded if metric is Metric.TTFT_PREDICTION_RATIO]


def test_every_term_of_the_route_is_an_attribute_in_ms() -> None:
    assert route_attributes(OUTCOME) == pytest.approx(
        {
            "tandem.route.queue_ms": 100.0, "tandem.route.prefill_ms": 200.0, "tandem.route.transfer_ms": 40.0,
            "tandem.route.room_wait_ms": 300.0, "tandem.route.gap_ms": 2.0, "tandem.route.num_streams": 3,
            "tandem.route.cost_ms": 646.0, "tandem.route.predicted_ttft_ms": 1000.0,
            "tandem.route.ttft_ms": 1250.0,
        }
    )  # fmt: skip


def test_the_metric_has_the_measured_over_the_predicted_time() -> None:
    ((ratio, labels),) = ratios_of(Finish("r", OUTCOME))
    assert ratio == pytest.approx(1.25)
    assert labels == {"path": "disaggregated"}


def test_a_request_with_a_failed_attempt_is_not_in_the_metric() -> None:
    assert ratios_of(Finish("r", replace(OUTCOME, attempts=2, path=RequestPath.RECOMPUTED))) == []


def test_a_failed_request_is_not_in_the_metric() -> None:
    assert ratios_of(Fail("r", QueueFull("full"), Timeline(Stage.QUEUE, 10.0))) == []


def test_shares_within_10_and_20_percent_are_read_from_the_buckets() -> None:
    assert {0.8, 0.9, 1.1, 1.2} <= set(RATIO_BUCKETS)
    assert list(RATIO_BUCKETS) == sorted(RATIO_BUCKETS)
