"""The metrics of ended and refused requests: goodput, gaps between tokens, sources of tokens, refusals, tenants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from core.config import RouterConfig, TelemetryConfig
from core.errors import DeadlineExceeded, InvalidRequest, KeyLimitReached, QueueFull, RequestCancelled, TandemError
from core.lifecycle import FinishReason, RequestPath, Stage, Timeline
from core.request import Request, SamplingParams
from core.step import SampledToken
from router.operations import trace_messages
from router.operations.request_metrics import RequestMetrics, reason_of
from router.operations.request_ring import MAX_TRACED, RequestRing
from router.operations.request_spans import predicted_s, root_attributes, route_attributes, spans_of
from router.operations.trace_messages import list_requests, trace_of
from router.requests.events import DecodeResult, Fail, Finish, Outcome, PrefillResult, Promise
from router.routing.question import Candidate, PrefixRead
from router.serving.choice_stream import ChoiceStream
from router.serving.receipt import phase_timings, receipt_of
from runtime.prometheus.metric_series import Buckets
from runtime.prometheus.metrics import MAX_TENANTS, OTHER_TENANTS, Metric
from runtime.prometheus.metrics_page import Metrics
from runtime.tracing.span_names import Attribute, SpanName
from runtime.tracing.trace_context import start_trace
from tandem_client.stubs.cluster_pb2 import ListRequestsRequest
from tandem_client.stubs.inference_pb2 import PhaseTimings, Usage

CANDIDATE = Candidate("p", "d", 64, 16, 5, 0)
TIMELINE = Timeline(
    Stage.FINISHED, 13.0, [(Stage.QUEUE, 10.0, 10.5), (Stage.PREFILL, 10.5, 11.0), (Stage.DECODE, 11.0, 13.0)]
)
PREFILL = PrefillResult(0, SampledToken(1), None, 64, 0.25, 0.5, kv_block_seconds=3.0)
DECODE = DecodeResult(
    FinishReason.LENGTH, 5, 48, 0.0, 0.0, 0.1, 0.0, 4096, kv_block_seconds=4.0, num_moved_blocks=2, num_skipped_blocks=3
)
OUTCOME = Outcome(
    finish_reason=FinishReason.LENGTH, num_prompt_tokens=80, num_output_tokens=5, cached_tokens=64,
    path=RequestPath.DISAGGREGATED, attempts=1, timeline=TIMELINE, candidate=CANDIDATE, first_token_s=1.0,
    predicted_first_token_s=1.0, prefill=PREFILL, decode=DECODE,
    promise=Promise(1.0, 0.25, RequestPath.DISAGGREGATED), kv_block_seconds=7.0, slo_itl_s=0.5,
)  # fmt: skip


class Recorded:
    """Request metrics, and what they have recorded."""

    def __init__(self, **router: Any) -> None:
        self.metrics = Metrics(TelemetryConfig(), lambda: ())
        self.requests = RequestMetrics(self.metrics, RouterConfig(**router).slo_ttft_ms)

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Counters by labels; of a histogram, the sums."""
        found = self.metrics._recorded[metric].snapshot()
        return {labels: value.total if isinstance(value, Buckets) else value for labels, value in found}

    def end(self, outcome: Outcome = OUTCOME, tenant: str = "", salt: str = "") -> None:
        self.requests.ended(stream(tenant, salt), Finish("r", outcome), 13.0)

    def fail(self, error: TandemError, *stages: Stage) -> None:
        timeline = Timeline(Stage.FINISHED, 12.0, [(stage, 10.0, 11.0) for stage in stages])
        self.requests.ended(stream(), Fail("r", error, timeline), 12.0)


def stream(tenant: str = "", salt: str = "") -> ChoiceStream:
    request = Request("r", (1,), 1, SamplingParams(max_tokens=4), 0, salt, tenant=tenant)
    text, root, names = cast(Any, None), start_trace({}, 1.0), cast(Any, None)
    choice = ChoiceStream(0, "model", "chat", request, "r", 10.0, text, root, lambda: None, names)
    choice.result = Finish("r", OUTCOME)
    return choice


@pytest.mark.parametrize(
    ("slo_ttft_ms", "slo_itl_s", "expected"),
    [(1000.0, 0.5, "met met"), (900.0, 0.5, "missed met"), (1000.0, 0.4, "met missed"), (1000.0, 0.0, "met met")],
)
def test_a_request_counts_as_good_if_it_met_both_limits(slo_ttft_ms: float, slo_itl_s: float, expected: str) -> None:
    recorded = Recorded(slo_ttft_ms=slo_ttft_ms)
    recorded.end(replace(OUTCOME, slo_itl_s=slo_itl_s))
    assert recorded.of(Metric.SLO_REQUESTS) == {tuple(expected.split()): 1}


def test_a_failed_request_missed_both_limits_and_a_cancelled_one_is_not_judged() -> None:
    recorded = Recorded()
    recorded.fail(DeadlineExceeded("late"), Stage.QUEUE, Stage.PREFILL)
    recorded.fail(RequestCancelled("gone"), Stage.QUEUE)
    assert recorded.of(Metric.SLO_REQUESTS) == {("missed", "missed"): 1}
    assert recorded.of(Metric.REFUSALS) == {}


def test_prompt_tokens_are_counted_by_worker_and_source_and_lengths_by_request() -> None:
    recorded = Recorded()
    recorded.end()
    local = CANDIDATE._replace(prefill_worker=None)
    alone = replace(DECODE, cached_tokens=40)
    recorded.end(replace(OUTCOME, prefill=None, decode=alone, path=RequestPath.LOCAL, candidate=local))
    recorded.end(replace(OUTCOME, prefill=replace(PREFILL, read_tokens=32), decode=None))
    assert recorded.of(Metric.PROMPT_TOKENS) == {
        ("prefill", "local_hit"): 64 + 32,
        ("prefill", "peer"): 32,
        ("prefill", "computed"): 2 * 16,
        ("decode", "local_hit"): 48 + 40,
        ("decode", "transferred"): 32,
        ("decode", "computed"): 40,
    }
    assert recorded.of(Metric.PROMPT_LENGTH) == {(): 3 * 80}
    assert recorded.of(Metric.OUTPUT_LENGTH) == {(): 3 * 5}


def test_a_prompt_whose_worker_has_not_answered_counts_as_predicted() -> None:
    """A stop string cancels the call of the worker that computes the prompt: the prompt was in no figure."""
    recorded, read = Recorded(), PrefixRead("other", 32, 0.1)
    local = CANDIDATE._replace(prefill_worker=None, prefill_s=0.25, read=read)
    stopped = replace(OUTCOME, prefill=None, decode=None, candidate=local, cached_tokens=48, read_tokens=32)
    recorded.end(stopped)
    assert recorded.of(Metric.PROMPT_TOKENS) == {
        ("decode", "local_hit"): 16,
        ("decode", "peer"): 32,
        ("decode", "computed"): 32,
    }
    assert (receipt_of(stopped).prefill_ms, phase_timings(stopped, 4.0).prefill_ms) == (250, 250)


def test_the_bytes_of_a_read_prefix_count_for_the_client_and_the_tenant_and_not_for_the_hand_off() -> None:
    recorded, read = Recorded(), replace(OUTCOME, prefill=replace(PREFILL, read_tokens=32, read_bytes=1000))
    recorded.end(read, tenant="a")
    assert receipt_of(read).transferred_bytes == 5096
    assert recorded.of(Metric.TENANT_BYTES) == {("a",): 5096}
    sizes = (Metric.TRANSFER_SIZE, Metric.MOVED_BLOCKS, Metric.SKIPPED_BLOCKS)
    assert [recorded.of(metric)[()] for metric in sizes] == [4096, 2, 3]


def test_a_client_reads_the_phases_of_its_request_in_milliseconds() -> None:
    began = [(Stage.TOKENIZE, 9.0, 10.0), *TIMELINE.history]
    decode = replace(DECODE, queue_s=5.0, prefill_s=6.0, transfer_exposed_s=0.05)
    outcome = replace(OUTCOME, timeline=replace(TIMELINE, history=began), decode=decode)
    local = replace(outcome, prefill=None, candidate=CANDIDATE._replace(prefill_worker=None))
    silent = replace(outcome, prefill=None, candidate=CANDIDATE._replace(prefill_s=0.25))  # its prefill worker
    for computing, queue_ms, prefill_ms in ((outcome, 250, 500), (local, 5000, 6000), (silent, 5000, 250)):
        timings, receipt = phase_timings(computing, 4.0), receipt_of(computing)
        assert timings == PhaseTimings(
            tokenize_ms=1000, router_queue_ms=500, prefill_queue_ms=queue_ms, prefill_ms=prefill_ms,
            first_token_ms=1000, transfer_ms=100, transfer_exposed_ms=50, decode_ms=2000, total_ms=4000,
        )  # fmt: skip
        assert (receipt.queue_ms, receipt.prefill_ms, receipt.decode_ms) == (500 + queue_ms, prefill_ms, 2000)
    nobody = phase_timings(replace(outcome, prefill=None, decode=None), 4.0)
    assert nobody.prefill_queue_ms == nobody.prefill_ms == nobody.transfer_ms == nobody.transfer_exposed_ms == 0


def test_the_span_of_a_queue_is_as_long_as_the_read_that_it_contains() -> None:
    read = CANDIDATE._replace(queue_s=0.1, room_wait_s=0.3, read=PrefixRead("s", 32, 0.2))
    alone = read._replace(prefill_worker=None)
    assert predicted_s(SpanName.PREFILL_QUEUE, read) == 0.2
    assert predicted_s(SpanName.PREFILL_QUEUE, read._replace(queue_s=0.25)) == 0.25
    assert [predicted_s(SpanName.DECODE_QUEUE, one) for one in (read, alone)] == [0.3, 0.5]


def test_the_speed_of_decode_is_counted_by_length() -> None:
    recorded = Recorded()
    recorded.end()
    recorded.end(replace(OUTCOME, num_prompt_tokens=5000))
    assert recorded.of(Metric.DECODE_SPEED) == {("le_256",): 2.0, ("le_16384",): 2.0}


def test_measured_times_are_compared_with_predicted_ones_after_one_attempt_only() -> None:
    recorded = Recorded()
    recorded.end(replace(OUTCOME, first_token_s=1.25))
    recorded.end(replace(OUTCOME, first_token_s=9.0, attempts=2, path=RequestPath.RECOMPUTED))
    recorded.fail(QueueFull("full"), Stage.QUEUE)
    assert recorded.of(Metric.TTFT_PREDICTION_RATIO) == {("disaggregated",): pytest.approx(1.25)}
    assert recorded.of(Metric.TPOT_PREDICTION_RATIO)["disaggregated",] == pytest.approx(2.0)


def test_every_term_of_the_route_is_an_attribute_in_ms() -> None:
    route = CANDIDATE._replace(queue_s=0.1, prefill_s=0.2, transfer_s=0.04, room_wait_s=0.3, gap_s=0.002, num_streams=3)
    route = route._replace(evict_s=0.004)
    outcome = replace(OUTCOME, candidate=route, first_token_s=1.25)
    attributes = route_attributes(outcome)
    assert attributes.keys() <= set(map(str, vars(Attribute).values())), "docs/traces.md lists them"
    assert attributes == pytest.approx(
        {
            "tandem.route.queue_ms": 100.0, "tandem.route.prefill_ms": 200.0, "tandem.route.transfer_ms": 40.0,
            "tandem.route.room_wait_ms": 300.0, "tandem.route.gap_ms": 2.0, "tandem.route.num_streams": 3,
            "tandem.route.evict_ms": 4.0, "tandem.route.cost_ms": 650.0, "tandem.route.predicted_ttft_ms": 1000.0,
            "tandem.route.ttft_ms": 1250.0,
        }
    )  # fmt: skip


def test_gaps_are_those_between_messages_and_zero_within_a_message() -> None:
    recorded, tokens = Recorded(), stream()
    for num_tokens, now in ((1, 11.0), (1, 11.25), (3, 11.5)):
        recorded.requests.note_tokens(tokens, num_tokens, now)
    gaps = recorded.metrics.buckets(
        Metric.INTER_TOKEN_LATENCY,
        gen_ai_operation_name="chat", gen_ai_provider_name="tandem", gen_ai_request_model="model",
    )  # fmt: skip
    assert (gaps.num_values, gaps.total) == (4, 0.5)
    assert gaps.counts[0] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full"), "queue_full"),
        (InvalidRequest("text", "too long"), "invalid_request"),
        (KeyLimitReached("too many"), "key_limit_reached"),
    ],
)
def test_a_refusal_has_its_reason(error: TandemError, reason: str) -> None:
    recorded = Recorded()
    recorded.requests.refused(error)
    recorded.fail(error, Stage.QUEUE)
    recorded.fail(error, Stage.QUEUE, Stage.PREFILL)  # a worker had it: a failure, and no refusal
    assert reason_of(error) == reason
    assert recorded.of(Metric.REFUSALS) == {(reason,): 2}
    assert recorded.of(Metric.REQUESTS) == {("none", error.code.value): 3}


def test_a_tenant_is_charged_with_the_receipt() -> None:
    recorded = Recorded()
    recorded.end(tenant="acme")
    recorded.end(tenant="acme")
    assert recorded.of(Metric.TENANT_REQUESTS) == {("acme", "length"): 2}
    assert recorded.of(Metric.TENANT_BLOCK_SECONDS) == {("acme",): 14.0}
    assert recorded.of(Metric.TENANT_BYTES) == {("acme",): 8192}
    assert recorded.of(Metric.TENANT_TOKENS) == {
        ("acme", "prompt"): 160,
        ("acme", "cached"): 128,
        ("acme", "output"): 10,
    }
    assert recorded.of(Metric.TENANT_SECONDS) == {
        ("acme", "queue"): 1.5,
        ("acme", "prefill"): 1.0,
        ("acme", "decode"): 4.0,
    }


def test_thousands_of_tenants_share_one_series_once_the_limit_is_reached() -> None:
    recorded = Recorded()
    for number in range(MAX_TENANTS + 500):
        recorded.end(tenant=f"tenant-{number}")
    recorded.end(tenant="tenant-0")
    counted = recorded.of(Metric.TENANT_REQUESTS)
    assert len(counted) == MAX_TENANTS + 1
    assert counted[OTHER_TENANTS, "length"] == 500
    assert counted["tenant-0", "length"] == 2


def test_a_cache_salt_is_on_no_page_and_in_no_trace() -> None:
    recorded, ring, secret = Recorded(), RequestRing(), "a-secret-salt"
    recorded.end(tenant=secret, salt=secret)
    assert recorded.of(Metric.TENANT_REQUESTS) == {("", "length"): 1}
    salted = stream(secret, secret)
    ring.add(salted.ended(13.0))
    shown = [
        recorded.metrics.text(), list_requests(ring, ListRequestsRequest()), trace_of(ring, "r", "router"),
        spans_of(salted.ended(13.0), "router"), salted.request,
    ]  # fmt: skip
    assert [part for part in shown if secret in str(part)] == []


def test_a_trace_that_clients_share_shows_its_newest_choices() -> None:
    """A trace of 512 choices, which any client can make, took 0.3 s of the router's loop at each look."""
    ring, named = RequestRing(), stream()
    for number in range(MAX_TRACED + 3):
        ring.add(replace(named.ended(13.0), request_id=f"r-{number}"))
    shown = trace_of(ring, named.trace.trace_id_hex, "router").requests
    assert [summary.number for summary in shown] == list(range(4, MAX_TRACED + 4))


def test_a_request_is_summed_up_once_for_all_who_list_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full ring took 7 ms of the router's loop for each caller."""
    ring, named, encode = RequestRing(), stream(), Mock(wraps=phase_timings)
    monkeypatch.setattr(trace_messages, "phase_timings", encode)
    for number in (1, 2):
        ring.add(named.ended(13.0))
        listed = [list_requests(ring, ListRequestsRequest()) for _ in range(3)]
        assert listed[0] == listed[1] == listed[2]
        listed[0].requests[0].tenant = "changed"
        assert list_requests(ring, ListRequestsRequest()) == listed[1]
        assert encode.call_count == len(trace_of(ring, "r", "router").requests) == number


def test_a_listed_request_has_its_times() -> None:
    named = stream()
    named.token_ids = [1] * 5
    ended = named.ended(13.0)
    assert (ended.total_s, ended.first_token_s, ended.tpot_s) == (3.0, 1.0, 0.5)


def test_a_listed_request_that_was_cancelled_has_its_tokens() -> None:
    ring, named = RequestRing(), stream()
    named.token_ids, named.result = [1] * 5, Fail("r", RequestCancelled("cancelled by the client"), TIMELINE)
    ring.add(named.ended(13.0))
    (listed,) = list_requests(ring, ListRequestsRequest()).requests
    assert (listed.end, listed.usage) == ("cancelled", Usage(prompt_tokens=1, completion_tokens=5))


def test_the_label_of_a_tenant_has_no_control_character() -> None:
    recorded = Recorded()
    recorded.end(tenant="a\u2028b\x0b")
    assert recorded.of(Metric.TENANT_REQUESTS) == {("a\\u2028b\\x0b", "length"): 1}


def test_operators_see_the_tenant_of_a_salted_request() -> None:
    named = stream("acme", "a-secret-salt")
    assert root_attributes(named.ended(13.0))[Attribute.TENANT] == "acme"
