"""A request that arrives with delivered tokens goes on behind them, as after the loss of a worker."""

from __future__ import annotations

from core.lifecycle import FinishReason, ServiceRole
from router.requests import events
from router.requests.events import DecodeResult
from tests.unit.router.driving_router import DrivenRouter, request

DELIVERED = (11, 12, 13)


def arrived(router: DrivenRouter, max_tokens: int = 8) -> None:
    resumed = events.RequestArrived(request(max_tokens=max_tokens), router.now, router.now + 60.0, (), DELIVERED)
    router.post(resumed)


def test_the_workers_get_the_delivered_tokens_behind_the_prompt() -> None:
    router = DrivenRouter(prefill=())
    arrived(router)
    (start,) = router.of(events.StartDecode)
    assert start.request.token_ids == (*request().token_ids, *DELIVERED)
    assert start.request.num_prompt_tokens == request().num_prompt_tokens


def test_only_new_tokens_are_delivered_from_the_next_index_on_and_the_end_counts_all() -> None:
    router = DrivenRouter(prefill=())
    arrived(router, max_tokens=5)
    router.tokens(3, 14, 15)
    result = DecodeResult(FinishReason.LENGTH, 2, 4, 0.0, 0.0, 0.0, 0.0, 0)
    router.post(events.DecodeReturned("r#1", result))
    delivered = [(each.first_index, each.token_ids) for each in router.of(events.Deliver)]
    assert delivered == [(3, (14, 15))]
    (finish,) = router.of(events.Finish)
    outcome = finish.outcome
    assert (outcome.num_output_tokens, outcome.num_resumed_tokens) == (5, 3)
    assert outcome.recomputed_tokens == request().num_prompt_tokens + 3 - 4


def test_a_resumed_stream_leaves_the_queue_before_new_requests() -> None:
    router = DrivenRouter(prefill=(), decode=())
    router.arrive(request(name="new"))
    arrived(router)
    router.join("D", ServiceRole.DECODE)
    assert [start.dispatch_id for start in router.of(events.StartDecode)] == ["r#1", "new#1"]
