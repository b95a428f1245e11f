"""A request continues on another worker after a failure, or ends with the error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import LayoutMismatch, OutOfDeviceMemory, TandemError, TransferFailed, WorkerUnavailable
from core.lifecycle import FinishReason, RequestPath, ServiceRole
from core.step import SampledToken
from router.requests import events
from tests.unit.router.driving_router import CONFIG, EOS, LAYOUT, DrivenRouter, request


def test_after_the_loss_of_a_prefill_worker_the_request_goes_to_another_pair() -> None:
    router = DrivenRouter(prefill=("P1", "P2"))
    router.arrive()
    assert router.dispatches() == [("r#1", "P1", "D")]
    router.post(events.WorkerLost("P1", "its process has ended"))
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"
    assert router.dispatches()[1:] == [("r#2", "P2", "D")]


def test_the_loss_of_a_prefill_worker_after_the_hand_off_changes_nothing() -> None:
    router = DrivenRouter()
    router.arrive()
    router.tokens(0, 11)
    router.post(events.WorkerLost("P", "its process has ended"))
    router.tokens(1, 12, 13, 14)
    router.decoded()
    assert router.delivered() == [11, 12, 13, 14]
    assert router.only(events.Finish).outcome.attempts == 1


def test_after_the_loss_of_a_decode_worker_another_one_continues_at_the_next_index() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    router.arrive()
    router.first_token(11)
    router.tokens(1, 12)
    router.post(events.WorkerLost("D1", "its process has ended"))
    again = router.of(events.StartDecode)[1]
    assert again.worker_id == "D2"
    assert again.request.token_ids == (*range(1, 9), 11, 12)
    assert again.request.num_prompt_tokens == 8
    router.tokens(2, 66, dispatch="r#1")
    router.tokens(2, 13, 14, dispatch="r#2")
    router.first_token(13, dispatch="r#2", index=2)
    router.decoded("r#2")
    assert router.delivered() == [11, 12, 13, 14], "tokens of the lost worker are dropped"
    outcome = router.only(events.Finish).outcome
    assert (outcome.path, outcome.attempts) == (RequestPath.RECOMPUTED, 2)


def test_a_request_finishes_if_its_worker_dies_between_the_last_token_and_the_result() -> None:
    router = DrivenRouter(prefill=())
    router.arrive(request("by_length", max_tokens=2))
    router.arrive(request("by_eos"))
    router.tokens(0, 11, 12, dispatch="by_length#1")
    router.tokens(0, 11, EOS, dispatch="by_eos#1")
    router.post(events.WorkerLost("D", "its process has ended"))
    reasons = {action.request_id: action.outcome.finish_reason for action in router.of(events.Finish)}
    assert reasons == {"by_length": FinishReason.LENGTH, "by_eos": FinishReason.STOP}


def test_a_request_finishes_if_its_decode_worker_dies_after_its_result_and_before_the_first_token() -> None:
    router = DrivenRouter()
    router.arrive(request(num_logprobs=0, max_tokens=1))
    router.decoded()
    router.post(events.WorkerLost("D", "its process has ended"))
    result = events.PrefillResult(0, SampledToken(10, logprob=-1.0), None, 0, 0.0, 0.0)
    router.post(events.PrefillReturned("r#1", result))
    assert router.only(events.Finish).outcome.attempts == 1


def test_after_a_failed_hand_off_the_next_attempt_avoids_both_workers() -> None:
    router = DrivenRouter(prefill=("P1", "P2"), decode=("D1", "D2"))
    router.arrive()
    router.decode_fails(TransferFailed("lease expired"))
    assert router.dispatches() == [("r#1", "P1", "D1"), ("r#2", "P2", "D2")]


def test_after_a_failed_hand_off_of_the_only_pair_the_decode_worker_computes_the_prompt() -> None:
    router = DrivenRouter()
    router.arrive()
    router.decode_fails(TransferFailed("lease expired"))
    assert router.dispatches() == [("r#1", "P", "D"), ("r#2", None, "D")]


def test_a_request_fails_with_its_last_error_after_max_attempts() -> None:
    router = DrivenRouter(prefill=())
    router.arrive()
    for attempt in (1, 2, 3):
        router.decode_fails(WorkerUnavailable(f"fault {attempt}"), f"r#{attempt}")
        router.report("D")
        router.pass_time(CONFIG.retry_pause_s)
    assert str(router.only(events.Fail).error) == "fault 3"
    assert len(router.dispatches()) == 3


def test_a_stream_that_makes_progress_survives_more_restarts_than_max_attempts() -> None:
    num_restarts = 3 * CONFIG.max_attempts
    router = DrivenRouter(prefill=())
    router.arrive(request(max_tokens=num_restarts + 1))
    for attempt in range(1, num_restarts + 1):
        router.tokens(attempt - 1, 10 + attempt, dispatch=f"r#{attempt}")
        router.decode_fails(WorkerUnavailable("restarted"), f"r#{attempt}")
        router.report("D")
    router.tokens(num_restarts, 99, dispatch=f"r#{num_restarts + 1}")
    router.decoded(f"r#{num_restarts + 1}")
    assert router.delivered() == [*range(11, 11 + num_restarts), 99]
    assert router.only(events.Finish).outcome.attempts == num_restarts + 1


def test_after_progress_max_attempts_without_a_token_end_the_request() -> None:
    router = DrivenRouter(prefill=())
    router.arrive()
    router.tokens(0, 11)
    for attempt in range(1, CONFIG.max_attempts + 2):
        assert not router.of(events.Fail)
        router.decode_fails(TransferFailed(f"fault {attempt}"), f"r#{attempt}")
        router.report("D")
        router.pass_time(1.0)
    assert str(router.only(events.Fail).error) == f"fault {CONFIG.max_attempts + 1}"


def test_an_error_that_is_not_retryable_ends_the_request() -> None:
    router = DrivenRouter()
    router.arrive()
    router.prefill_fails(TandemError("the step failed"))
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"
    assert str(router.only(events.Fail).error) == "the step failed"


def test_a_worker_without_memory_gets_nothing_until_it_reports_again() -> None:
    """Its failed requests make it empty. Without the pause it would attract every request."""
    router = DrivenRouter(replace(CONFIG, max_queued=8), prefill=(), decode=("D1", "D2"))
    router.report("D2", num_calls=50, num_decoding=50, decode_context=50_000)
    router.arrive()
    assert router.dispatches() == [("r#1", None, "D1")]
    router.decode_fails(OutOfDeviceMemory("no memory"))
    for name in ("s", "t"):
        router.arrive(request(name))
    assert {worker for _, _, worker in router.dispatches()[1:]} == {"D2"}
    router.report("D1")
    router.arrive(request("u"))
    assert router.dispatches()[-1] == ("u#1", None, "D1")


def test_requests_of_a_restarted_worker_are_dispatched_again() -> None:
    router = DrivenRouter(prefill=())
    router.arrive()
    router.join("D", ServiceRole.DECODE, incarnation=2)
    assert router.dispatches() == [("r#1", None, "D"), ("r#2", None, "D")]
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"


def test_a_fresh_snapshot_of_the_same_process_leaves_its_dispatches_open() -> None:
    router = DrivenRouter(prefill=())
    router.arrive()
    assert router.join("D", ServiceRole.DECODE) == []
    router.tokens(0, 11, 12, 13, 14)
    router.decoded()
    assert router.delivered() == [11, 12, 13, 14]


def test_a_restarted_worker_with_another_layout_is_refused_and_changes_nothing() -> None:
    router = DrivenRouter()
    router.arrive()
    with pytest.raises(LayoutMismatch):
        router.join("D", ServiceRole.DECODE, incarnation=2, layout=replace(LAYOUT, model="another"))
    assert router.machine.view.num_in_flight == 1
    router.post(events.WorkerLost("D", "it cannot join"))
    assert router.only(events.CancelDispatch).dispatch_id == "r#1"
