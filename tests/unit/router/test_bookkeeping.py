"""The router's records of a request: its place in the queue, its deadlines, its calls. They go with the request."""

from __future__ import annotations

from dataclasses import replace

from core.block_hash import sequence_hashes
from core.errors import QueueFull, TransferFailed, WorkerUnavailable
from core.lifecycle import ServiceRole, Stage
from core.step import SampledToken
from router.requests import events
from tests.unit.router.driving_router import CONFIG, LAYOUT, DrivenRouter, request

LOST = WorkerUnavailable("connection reset")


def test_a_prefill_worker_that_has_answered_has_room_for_the_next_prompt() -> None:
    for answer in (lambda r: r.first_token(11, "a#1"), lambda r: r.prefill_fails(LOST, "a#1")):
        router = DrivenRouter(replace(CONFIG, max_in_flight_per_worker=1), decode=("D1", "D2"))
        router.arrive(request("a"))
        router.tokens(0, 11, dispatch="a#1")  # now the request needs nothing more from the prefill worker
        router.arrive(request("b"))
        assert router.machine.view.num_queued == 1
        answer(router)
        router.report("P")
        assert [(dispatch, worker) for dispatch, worker, _ in router.dispatches()] == [("a#1", "P"), ("b#1", "P")]


def test_a_cancelled_request_cancels_the_call_that_is_still_open() -> None:
    router = DrivenRouter()
    router.arrive()
    router.decoded()
    router.post(events.ClientCancelled("r"))
    assert router.only(events.CancelDispatch).dispatch_id == "r#1", "the prefill call is open"


def test_the_outcome_has_the_cached_tokens_of_the_prefill_worker() -> None:
    router = DrivenRouter()
    router.arrive(request(max_tokens=2))
    found = events.PrefillResult(0, SampledToken(11), None, 4, 0.25, 0.5)
    router.post(events.PrefillReturned("r#1", found))
    router.tokens(1, 12)
    router.decoded()
    outcome = router.only(events.Finish).outcome
    assert outcome.prefill == found
    assert outcome.cached_tokens == 4
    assert [stage for stage, _, _ in outcome.timeline.history] == [
        Stage.TOKENIZE, Stage.QUEUE, Stage.PREFILL, Stage.DECODE,
    ]  # fmt: skip


def test_a_retry_is_routed_by_the_prompt_and_its_delivered_tokens() -> None:
    """A worker that has the delivered tokens cached, too, has fewer tokens to compute."""
    router = DrivenRouter(prefill=("P1", "P2"), decode=("D1", "D2"))
    router.arrive(request(prompt=range(1, 9), max_tokens=20))
    router.first_token(9)
    router.tokens(1, 10, 11, 12)
    whole = sequence_hashes(range(1, 13), LAYOUT.block_size)
    assert len(whole) == 3
    router.store("P2", *whole)
    router.store("P1", *whole[:2])
    router.decode_fails(QueueFull("no room"))
    assert router.dispatches()[-1][1] == "P2"


def test_a_request_that_has_ended_leaves_no_deadline() -> None:
    def finish(router: DrivenRouter) -> None:
        router.first_token(11)
        router.tokens(1, 12)
        router.decoded()

    def fail(router: DrivenRouter) -> None:
        router.decode_fails(TransferFailed("once"))
        router.post(events.ClientCancelled("r"))

    def leave_the_queue(router: DrivenRouter) -> None:
        router.post(events.ClientCancelled("r"))

    for end in (finish, fail, leave_the_queue):
        router = DrivenRouter(decode=() if end is leave_the_queue else ("D",))
        before = len(router.machine._deadlines)
        router.arrive(request(max_tokens=2))
        end(router)
        router.pass_time(1.0)  # past the pause of a retry
        assert len(router.machine._deadlines) == before


def test_a_lost_worker_leaves_no_deadline() -> None:
    router = DrivenRouter(prefill=(), decode=())
    router.join("D", ServiceRole.DECODE)
    router.post(events.WorkerLost("D", "gone"))
    assert router.machine.next_deadline() is None
