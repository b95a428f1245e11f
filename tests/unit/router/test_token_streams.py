"""The machine takes tokens by the step. The end of a call and its tokens arrive in any order; a broken stream loses no
token for the client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.lifecycle import FinishReason, ServiceRole
from core.step import SampledToken
from router.requests import events
from router.requests.machine import MISSING_TOKENS_S
from tests.unit.router.driving_router import DrivenRouter, request, step_tokens


def decoding(*names: str, decode: tuple[str, ...] = ("D",), **options: object) -> DrivenRouter:
    """The requests are dispatched to the decode workers alone."""
    router = DrivenRouter(prefill=(), decode=decode)
    for name in names or ("r",):
        router.arrive(request(name, **options))  # type: ignore[arg-type]
    return router


def test_one_message_brings_each_request_the_run_of_its_new_tokens() -> None:
    router = decoding("a", "b")
    a, b = router.call_of("a#1"), router.call_of("b#1")
    steps = [(a, 0, 11), (b, 0, 21), (a, 1, 12), (b, 1, 22), (a, 2, 13)]
    actions = router.post(step_tokens(*((call, index, SampledToken(token)) for call, index, token in steps)))
    assert actions == [events.Deliver("a", 0, (11, 12, 13), ()), events.Deliver("b", 0, (21, 22), ())]


def test_log_probabilities_go_to_the_requests_that_asked_for_them() -> None:
    router = decoding("plain")
    router.arrive(request("asks", num_logprobs=1))
    tokens = [SampledToken(11, -0.5, ((11, -0.5),)), SampledToken(12, -0.25, ((12, -0.25),))]
    asks, plain = router.call_of("asks#1"), router.call_of("plain#1")
    router.post(step_tokens((plain, 0, SampledToken(7)), (asks, 0, tokens[0])))
    router.post(step_tokens((asks, 1, tokens[1]), (plain, 1, SampledToken(8))))
    assert router.delivered("plain") == [7, 8]
    assert [action.logprobs for action in router.of(events.Deliver) if action.request_id == "asks"] == [
        (tokens[0],), (tokens[1],),
    ]  # fmt: skip
    assert not any(action.logprobs for action in router.of(events.Deliver) if action.request_id == "plain")


def test_a_request_whose_end_overtakes_its_tokens_finishes_at_the_last_of_them() -> None:
    router = decoding()
    router.tokens(0, 11, 12)
    router.decoded(num_tokens=4)
    assert not router.of(events.Finish)
    router.tokens(2, 13)
    assert not router.of(events.Finish)
    router.tokens(3, 14)
    assert router.delivered() == [11, 12, 13, 14]
    outcome = router.only(events.Finish).outcome
    assert (outcome.num_output_tokens, outcome.attempts) == (4, 1)
    router.pass_time(2 * MISSING_TOKENS_S)
    assert not router.of(events.Fail)


def test_tokens_that_never_follow_the_end_are_generated_by_another_worker() -> None:
    router = decoding(decode=("D1", "D2"))
    router.tokens(0, 11, 12)
    router.decoded(num_tokens=4)
    router.pass_time(MISSING_TOKENS_S - 0.1)
    assert len(router.dispatches()) == 1
    router.report("D2")
    router.pass_time(0.2)
    assert router.dispatches()[1:] == [("r#2", None, "D2")]
    router.tokens(2, 66, 66, dispatch="r#1")  # late: the first attempt is over
    router.tokens(2, 13, 14, dispatch="r#2")
    router.decoded("r#2")
    assert router.delivered() == [11, 12, 13, 14]
    assert router.only(events.Finish).outcome.attempts == 2


def test_a_late_answer_of_the_prefill_worker_is_not_the_fault_of_the_decode_worker() -> None:
    """All tokens of the stream have arrived. Only the prefill worker sends the first one with its log-probabilities."""
    router = DrivenRouter()
    router.arrive(request(num_logprobs=0))
    first, *others = [SampledToken(token, -0.5) for token in (11, 12, 13, 14)]
    router.decoded(num_tokens=4)
    router.sampled_tokens(1, *others)
    router.pass_time(MISSING_TOKENS_S + 0.1)
    assert router.dispatches() == [("r#1", "P", "D")]
    router.post(events.PrefillReturned("r#1", events.PrefillResult(0, first, None, 0, 0.0, 0.0)))
    assert router.delivered() == [11, 12, 13, 14]
    assert router.only(events.Finish).outcome.attempts == 1


def test_a_lost_stream_sends_every_request_with_tokens_to_come_to_another_worker() -> None:
    router = decoding("a", "b", decode=("D1",), max_tokens=2)
    router.tokens(0, 11, dispatch="a#1")
    router.tokens(0, 21, dispatch="b#1")
    router.decoded("b#1", num_tokens=2)  # its last token is still on the stream
    router.join("D2", ServiceRole.DECODE)
    router.post(events.TokenStreamLost("D1", "connection reset"))
    assert {action.dispatch_id for action in router.of(events.CancelDispatch)} == {"a#1"}, "the other call has returned"
    assert sorted(router.dispatches()[2:]) == [("a#2", None, "D2"), ("b#2", None, "D2")]
    assert [start.request.token_ids[8:] for start in router.of(events.StartDecode)[2:]] == [(11,), (21,)]


def test_after_the_loss_of_its_stream_a_worker_gets_nothing_before_its_next_snapshot() -> None:
    router = decoding()
    router.post(events.TokenStreamLost("D", "connection reset"))
    assert len(router.dispatches()) == 1
    router.join("D", ServiceRole.DECODE)
    assert router.dispatches()[1:] == [("r#2", None, "D")]
    router.tokens(0, 11, 12, 13, 14, dispatch="r#2")
    router.decoded("r#2")
    assert router.only(events.Finish).outcome.attempts == 2


MESSAGES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=12)


@given(MESSAGES, st.integers(0, 12), st.booleans())
def test_each_index_is_delivered_once_and_in_order_whatever_arrives(
    messages: list[list[int]], end_at: int, with_logprobs: bool
) -> None:
    """Messages repeat, skip and reorder indexes, and the end comes at any place; then everything arrives."""
    router = decoding(max_tokens=6, num_logprobs=0 if with_logprobs else None)
    call = router.call_of("r#1")

    def send(indexes: list[int]) -> None:
        tokens = (SampledToken(10 + index, -1.0 if with_logprobs else None) for index in indexes)
        router.post(step_tokens(*((call, index, token) for index, token in zip(indexes, tokens, strict=True))))

    for place, indexes in enumerate([*messages, list(range(6))]):
        if place == min(end_at, len(messages)):
            router.decoded(num_tokens=6, reason=FinishReason.LENGTH)
        send(indexes)
    assert router.delivered() == [10, 11, 12, 13, 14, 15]
    assert router.only(events.Finish).outcome.attempts == 1
    logprobs = [token.token_id for action in router.of(events.Deliver) for token in action.logprobs]
    assert logprobs == (router.delivered() if with_logprobs else [])
