"""The router joins the two calls of a request into one stream, which ends exactly once."""

from __future__ import annotations

import pytest

from core.errors import DeadlineExceeded, InvalidRequest, RequestCancelled, WorkerUnavailable
from core.lifecycle import FinishReason, RequestPath, ServiceRole, Stage, WorkerState
from core.step import SampledToken
from router.requests import events
from tests.unit.router.driving_router import LAYOUT, DrivenRouter, agent, request

LOST = WorkerUnavailable("connection reset")


# ---- two calls


def test_both_calls_start_at_once_with_one_transfer_id_and_the_address_of_the_other_worker() -> None:
    router = DrivenRouter()
    router.arrive(timeout_s=5.0)
    decode, prefill = router.only(events.StartDecode), router.only(events.StartPrefill)
    assert decode.source == (prefill.transfer_id, agent("P"))
    assert prefill.reader == agent("D")
    assert decode.dispatch_id == prefill.dispatch_id == "r#1"
    assert decode.timeout_s == prefill.timeout_s == 5.0


def test_the_first_token_comes_from_the_prefill_worker_and_the_rest_from_the_decode_worker() -> None:
    router = DrivenRouter()
    router.arrive()
    router.first_token(11)
    assert router.delivered() == [11]
    router.tokens(0, 11)
    router.tokens(1, 12, 13, 14)
    router.decoded()
    assert router.delivered() == [11, 12, 13, 14]
    outcome = router.only(events.Finish).outcome
    assert (outcome.finish_reason, outcome.path, outcome.attempts) == (
        FinishReason.LENGTH,
        RequestPath.DISAGGREGATED,
        1,
    )
    assert outcome.num_output_tokens == 4
    assert not router.of(events.CancelDispatch), "both calls had ended"


def test_the_decode_worker_may_send_the_first_token_before_the_prefill_worker_answers() -> None:
    router = DrivenRouter()
    router.arrive()
    router.tokens(0, 11, 12)
    router.first_token(11)
    assert router.delivered() == [11, 12]


def test_a_request_finishes_if_the_prefill_worker_answers_after_the_decode_worker() -> None:
    router = DrivenRouter()
    router.arrive(request(num_logprobs=0))
    with_logprob = [SampledToken(10 + i, logprob=-1.0) for i in (1, 2, 3)]
    router.sampled_tokens(0, SampledToken(10), *with_logprob)
    router.decoded()
    assert not router.of(events.Finish), "the first token lacks its log-probability"
    result = events.PrefillResult(0, SampledToken(10, logprob=-1.0), None, 0, 0.0, 0.0)
    router.post(events.PrefillReturned("r#1", result))
    assert router.delivered() == [10, 11, 12, 13]
    assert router.only(events.Finish).outcome.finish_reason is FinishReason.LENGTH


def test_a_request_is_retried_if_both_calls_end_and_a_token_is_missing() -> None:
    router = DrivenRouter()
    router.arrive()
    router.tokens(2, 13)
    router.decoded()
    router.first_token(11)
    assert router.delivered() == [11]
    assert len(router.dispatches()) == 2


def test_a_first_token_that_is_also_the_last_one_cancels_the_decode_call() -> None:
    router = DrivenRouter()
    router.arrive(request(max_tokens=1))
    router.first_token(11, finish_reason=FinishReason.LENGTH)
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"
    assert router.only(events.Finish).outcome.num_output_tokens == 1


def test_the_hand_off_of_an_engine_goes_to_the_decode_worker_before_the_first_token_to_the_client() -> None:
    router = DrivenRouter()
    router.arrive()
    started = router.only(events.StartPrefill)
    result = events.PrefillResult(0, SampledToken(11), None, 0, 0.0, 0.0, handoff=b"kv")
    hand_over, deliver = router.post(events.PrefillReturned("r#1", result))
    assert isinstance(hand_over, events.HandOver)
    assert (hand_over.dispatch_id, hand_over.worker_id, hand_over.handoff) == ("r#1", "D", b"kv")
    assert hand_over.transfer_id == started.transfer_id
    assert isinstance(deliver, events.Deliver)


def test_the_hand_off_of_a_request_that_has_ended_is_dropped() -> None:
    router = DrivenRouter()
    router.arrive(request(max_tokens=1))
    router.first_token(11, finish_reason=FinishReason.LENGTH, handoff=b"kv")
    assert not router.of(events.HandOver)


def test_a_stop_string_ends_the_request_and_its_calls() -> None:
    router = DrivenRouter()
    router.arrive()
    router.first_token(11)
    router.post(events.StopMatched("r"))
    assert router.only(events.Finish).outcome.finish_reason is FinishReason.STOP
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"
    router.tokens(1, 12)
    router.decoded()
    assert router.delivered() == [11]


def test_the_timeline_has_the_duration_of_each_stage() -> None:
    router = DrivenRouter(prefill=(), decode=())
    router.arrive()
    router.pass_time(2.0)
    router.join("D", ServiceRole.DECODE)
    router.now += 3.0
    router.tokens(0, 11)
    router.now += 1.0
    router.decoded()
    outcome = router.only(events.Finish).outcome
    spent = {stage: outcome.timeline.seconds_in(stage) for stage in (Stage.QUEUE, Stage.PREFILL, Stage.DECODE)}
    assert spent == {Stage.QUEUE: 2.0, Stage.PREFILL: 3.0, Stage.DECODE: 1.0}
    assert outcome.first_token_s == 5.0


# ---- one call


def test_with_no_prefill_worker_the_decode_worker_computes_the_prompt() -> None:
    router = DrivenRouter(prefill=())
    router.arrive()
    assert router.only(events.StartDecode).source is None
    router.tokens(0, 11, 12, 13, 14)
    router.decoded()
    assert router.only(events.Finish).outcome.path is RequestPath.LOCAL


def test_the_outcome_has_the_predicted_and_the_actual_time_to_the_first_token() -> None:
    router = DrivenRouter(prefill=(), decode=())
    router.arrive()
    router.pass_time(2.0)
    router.join("D", ServiceRole.DECODE)
    router.now += 0.5
    router.tokens(0, 11, 12, 13, 14)
    router.decoded()
    outcome = router.only(events.Finish).outcome
    assert outcome.first_token_s == 2.5
    assert outcome.predicted_first_token_s == pytest.approx(2.0 + outcome.candidate.first_token_s)


def test_the_prediction_is_that_of_the_dispatch_before_the_first_token() -> None:
    router = DrivenRouter(prefill=("P1", "P2"))
    router.arrive()
    router.now += 3.0
    router.prefill_fails(LOST)
    router.first_token(11, "r#2")
    router.now += 5.0
    router.decode_fails(LOST, "r#2")
    router.report("P2")
    router.report("D")
    router.tokens(1, 12, 13, 14, dispatch="r#3")
    router.decoded("r#3")
    outcome = router.only(events.Finish).outcome
    assert outcome.attempts == 3
    assert 3.0 < outcome.predicted_first_token_s < 4.0


# ---- deadlines


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_a_request_ends_at_its_deadline_in_every_stage(stage: str) -> None:
    router = DrivenRouter(decode=() if stage == "queue" else ("D",))
    router.arrive(timeout_s=5.0)
    if stage == "decode":
        router.first_token(11)
    router.pass_time(4.9)
    assert not router.of(events.Fail)
    router.pass_time(0.2)
    failed = router.only(events.Fail)
    assert isinstance(failed.error, DeadlineExceeded)
    assert stage in str(failed.error)
    assert len(router.of(events.CancelDispatch)) == (stage != "queue")
    assert (router.machine.view.num_queued, router.machine.view.num_in_flight) == (0, 0)


def test_a_retry_gets_the_time_that_remains_to_the_deadline() -> None:
    router = DrivenRouter()
    router.arrive(timeout_s=5.0)
    router.now += 2.0
    router.prefill_fails(LOST)
    assert [action.timeout_s for action in router.of(events.StartDecode)] == [5.0, 3.0]


def test_without_a_decode_worker_a_request_fails_after_worker_wait_s() -> None:
    router = DrivenRouter(decode=())
    router.arrive()
    router.report("P")
    router.pass_time(19.9)
    assert not router.of(events.Fail)
    router.pass_time(0.2)
    assert isinstance(router.only(events.Fail).error, WorkerUnavailable)


# ---- cancellation


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode", "retry"])
def test_a_cancelled_request_ends_at_once_in_every_stage(stage: str) -> None:
    router = DrivenRouter(decode=() if stage == "queue" else ("D",))
    router.arrive()
    if stage in ("decode", "retry"):
        router.first_token(11)
    if stage == "retry":
        router.decode_fails(LOST)
        assert router.machine.view.num_queued == 1
    router.post(events.ClientCancelled("r"))
    assert isinstance(router.only(events.Fail).error, RequestCancelled)
    assert len(router.of(events.CancelDispatch)) == (stage in ("prefill", "decode")), "only open calls are cancelled"
    router.tokens(1, 12)
    router.decoded()
    router.post(events.ClientCancelled("r"))
    assert len(router.of(events.Fail)) == 1
    assert not router.of(events.Finish)


# ---- the queue


def test_a_request_too_large_for_every_decode_worker_is_refused_at_once() -> None:
    router = DrivenRouter()
    largest = 64 * LAYOUT.block_size
    router.arrive(request("fits", max_tokens=largest - 8 + 1))  # the last token needs no slot
    with pytest.raises(InvalidRequest, match=f"max_tokens: .*the context of {largest + 1} tokens"):
        router.arrive(request("does not", max_tokens=largest - 8 + 2))
    router.machine.check()
    assert router.machine.view.num_in_flight == 1


# ---- workers


def test_a_silent_worker_gets_no_request_and_is_then_lost() -> None:
    router = DrivenRouter(prefill=())
    router.pass_time(3.1)
    router.arrive()
    assert router.dispatches() == [], "stale"
    router.report("D")
    assert len(router.dispatches()) == 1, "usable again after the report"
    router.pass_time(10.1)
    assert router.machine.workers.get("D") is None
    assert router.machine.view.num_queued == 1, "its request is queued again"


def test_a_draining_worker_finishes_its_requests_and_gets_no_new_ones() -> None:
    router = DrivenRouter(prefill=(), decode=("D1", "D2"))
    router.arrive(request("a"))
    router.report("D1", WorkerState.DRAINING)
    router.arrive(request("b"))
    assert router.dispatches() == [("a#1", None, "D1"), ("b#1", None, "D2")]
    router.tokens(0, 11, 12, 13, 14, dispatch="a#1")
    router.decoded("a#1")
    assert router.delivered("a") == [11, 12, 13, 14]


def test_reports_of_a_worker_that_never_joined_are_ignored() -> None:
    router = DrivenRouter(decode=())
    router.arrive()
    assert router.report("D") == []
    assert router.machine.view.num_queued == 1


def test_a_failed_prefill_call_is_ignored_after_the_decode_worker_has_sent_its_token() -> None:
    router = DrivenRouter()
    router.arrive()
    router.tokens(0, 11)
    assert router.prefill_fails(LOST) == []
    router.tokens(1, 12, 13, 14)
    router.decoded()
    assert router.delivered() == [11, 12, 13, 14]
    assert not router.of(events.CancelDispatch), "both calls had ended"
