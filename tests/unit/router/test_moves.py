"""A decode worker asks to move a request: the router chooses the target, and takes each token from one of the two."""

from __future__ import annotations

import pytest

from core.errors import DeadlineExceeded, QueueFull, TransferFailed, WorkerDrains, WorkerUnavailable
from core.lifecycle import FinishReason, MoveReason, RequestPath, ServiceRole, WorkerState
from core.scheduling.block_pool import Column
from core.step import SampledToken
from router.requests import events
from router.requests.moves import MAX_ROOM_MOVES, MoveOutcome
from tests.unit.router.driving_router import DrivenRouter, agent, request

SOURCE, TARGET = "r#1", "r#2"


class MovingRouter(DrivenRouter):
    """Two decode workers. "r" has four of its twenty tokens from D1, which drains."""

    def __init__(self, num_logprobs: int | None = None) -> None:
        super().__init__(decode=("D1", "D2"))
        self.report("D2", state=WorkerState.DRAINING)
        self.report("D1")
        self.arrive(request(max_tokens=20, num_logprobs=num_logprobs))
        logprob = None if num_logprobs is None else -1.0
        first = events.PrefillResult(0, SampledToken(10, logprob), None, 0, 0.0, 0.0)
        self.post(events.PrefillReturned(SOURCE, first))
        self.sampled_tokens(1, *(SampledToken(token, logprob) for token in (11, 12, 13)))
        self.report("D2", takes_moves=True)
        self.report("D1", state=WorkerState.DRAINING, takes_moves=True)

    def ask(self, reason: MoveReason = MoveReason.DRAIN, dispatch: str = SOURCE) -> list[events.RouterAction]:
        return self.notice(dispatch, None, reason)

    def notice(
        self, dispatch: str, first_index: int | None, reason: MoveReason = MoveReason.DRAIN
    ) -> list[events.RouterAction]:
        moves = [events.MoveNotice(self.call_of(dispatch), first_index, reason)]
        return self.post(events.StepTokens((), (), (), {}, moves))

    def target_fails(self) -> list[events.RouterAction]:
        return self.decode_fails(TransferFailed("the hand-off failed"), TARGET)

    def outcome(self) -> events.Outcome:
        return self.only(events.Finish).outcome

    def moved(self) -> list[events.RouterAction]:
        result = events.DecodeResult(FinishReason.HANDOFF, 4, 0, 0.0, 0.0, 0.0, 0.0, 0, kv_block_seconds=2.0)
        return self.post(events.DecodeReturned(SOURCE, result))


def test_the_router_opens_the_call_of_the_target_and_tells_the_source_who_reads() -> None:
    router = MovingRouter()
    decode, start = router.ask()
    assert isinstance(decode, events.StartDecode)
    assert isinstance(start, events.StartMove)
    assert (decode.dispatch_id, decode.worker_id, decode.is_move) == (TARGET, "D2", True)
    assert decode.request.token_ids == (*range(1, 9), 10, 11, 12, 13)
    assert decode.source == (start.transfer_id, agent("D1"))
    assert (start.source_id, start.worker_id, start.reader, start.num_tokens) == (SOURCE, "D1", agent("D2"), 12)
    assert not router.ask(), "it moves already"


def test_both_workers_send_tokens_and_each_index_is_delivered_once() -> None:
    router = MovingRouter()
    router.ask()
    router.tokens(4, 14, 15)
    router.notice(SOURCE, 6)
    router.tokens(4, 14, 15, dispatch=TARGET)
    router.notice(TARGET, 6)
    router.tokens(6, 16, dispatch=TARGET)
    router.tokens(6, 99)
    assert router.delivered() == [10, 11, 12, 13, 14, 15, 16]
    router.moved()
    router.tokens(7, *range(17, 30), dispatch=TARGET)
    router.decoded(TARGET)
    outcome = router.outcome()
    assert (outcome.path, outcome.num_moves, outcome.attempts) == (RequestPath.MIGRATED, 1, 1)
    assert outcome.candidate.decode_worker == "D2"
    assert (outcome.recomputed_tokens, outcome.kv_block_seconds) == (0, 2.0)
    assert router.machine.view.num_moves() == {MoveOutcome(MoveReason.DRAIN, "moved"): 1}


def test_the_target_brings_what_the_source_could_not_send_any_more() -> None:
    router = MovingRouter()
    router.ask()
    router.notice(SOURCE, 6)
    router.decode_fails(WorkerUnavailable("D1 died"))
    assert not router.of(events.CancelDispatch), "the target goes on"
    router.tokens(4, 14, 15, 16, dispatch=TARGET)
    assert router.delivered() == list(range(10, 17))
    assert not router.machine.view.num_retries()


def test_a_source_that_fails_before_it_hands_over_fails_the_attempt() -> None:
    router = MovingRouter()
    router.ask()
    router.decode_fails(WorkerUnavailable("D1 died"))
    assert router.only(events.CancelDispatch).dispatch_id == TARGET
    assert router.dispatches()[-1][0] == "r#3"
    router.tokens(4, 99, dispatch=TARGET)
    assert len(router.delivered()) == 4


def test_a_source_that_is_lost_after_it_has_handed_over_fails_nothing() -> None:
    router = MovingRouter()
    router.ask()
    router.notice(SOURCE, 4)
    router.post(events.WorkerLost("D1", "its process has ended"))
    router.tokens(4, *range(14, 30), dispatch=TARGET)
    router.decoded(TARGET)
    assert router.outcome().path is RequestPath.MIGRATED


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_after_the_failure_of_the_target_the_source_samples_on(is_handed_over: bool) -> None:
    router = MovingRouter()
    router.ask()
    if is_handed_over:
        router.notice(SOURCE, 4)
    (resume,) = router.target_fails()
    assert isinstance(resume, events.ResumeSequence)
    assert (resume.dispatch_id, resume.worker_id) == (SOURCE, "D1")
    router.tokens(4, *range(14, 30))
    router.tokens(4, 99, dispatch=TARGET)
    router.decoded()
    assert router.delivered() == list(range(10, 30))
    assert router.outcome().path is RequestPath.DISAGGREGATED
    assert router.machine.view.num_moves() == {MoveOutcome(MoveReason.DRAIN, "failed"): 1}


@pytest.mark.parametrize("loss", [events.WorkerLost("D2", "died"), events.TokenStreamLost("D2", "reset")])
def test_the_router_ends_the_call_of_a_lost_target_before_it_resumes_the_source(loss: events.RouterEvent) -> None:
    router = MovingRouter()
    router.ask()
    cancel, resume = (a for a in router.post(loss) if not isinstance(a, events.UpdatePeers))
    assert cancel == events.CancelDispatch(TARGET)
    assert isinstance(resume, events.ResumeSequence)


def test_a_target_that_fails_after_its_first_token_resumes_nothing() -> None:
    router = MovingRouter()
    router.ask()
    router.notice(SOURCE, 4)
    router.tokens(4, 14, dispatch=TARGET)
    router.target_fails()
    assert not router.of(events.ResumeSequence)
    assert router.only(events.CancelDispatch).dispatch_id == SOURCE, "the source may wait for its release"
    assert router.dispatches()[-1][0] == "r#3"
    router.tokens(5, 99)
    assert router.delivered() == [10, 11, 12, 13, 14]


def test_a_source_that_cannot_begin_ends_the_call_of_the_target() -> None:
    router = MovingRouter()
    router.ask()
    router.post(events.MoveRefused(TARGET, TransferFailed("it has ended")))
    assert router.only(events.CancelDispatch).dispatch_id == TARGET
    router.post(events.MoveRefused(TARGET, TransferFailed("again")))
    router.tokens(4, *range(14, 30))
    router.decoded()
    assert router.outcome().num_moves == 0


def test_the_source_may_return_before_the_first_token_of_the_target() -> None:
    router = MovingRouter()
    router.ask()
    router.moved()
    router.tokens(4, *range(14, 30), dispatch=TARGET)
    router.decoded(TARGET)
    assert router.outcome().path is RequestPath.MIGRATED


def test_a_sequence_that_moved_to_a_call_which_the_router_has_ended_is_tried_again() -> None:
    router = MovingRouter()
    router.ask()
    router.target_fails()
    router.moved()
    assert router.dispatches()[-1][0] == "r#3"


def test_the_end_of_the_request_ends_both_calls() -> None:
    router = MovingRouter()
    router.ask()
    router.post(events.StopMatched("r"))
    assert {cancel.dispatch_id for cancel in router.of(events.CancelDispatch)} == {SOURCE, TARGET}
    router.tokens(4, 99, dispatch=TARGET)


def test_a_cancel_after_the_move_ends_both_calls_while_the_source_waits() -> None:
    router = MovingRouter()
    router.ask()
    router.tokens(4, 14, dispatch=TARGET)
    router.post(events.ClientCancelled("r"))
    assert {cancel.dispatch_id for cancel in router.of(events.CancelDispatch)} == {SOURCE, TARGET}


def test_a_deadline_during_a_move_ends_both_calls() -> None:
    router = MovingRouter()
    router.ask()
    router.pass_time(70.0)
    assert isinstance(router.only(events.Fail).error, DeadlineExceeded | WorkerUnavailable)


def test_log_probabilities_come_from_the_source_even_after_the_move() -> None:
    router = MovingRouter(num_logprobs=0)
    router.ask()
    router.tokens(4, 14, dispatch=TARGET)  # repeated, and without log-probabilities
    router.notice(TARGET, 5)
    assert len(router.delivered()) == 4
    router.sampled_tokens(4, SampledToken(14, -1.0), SampledToken(99, -1.0))
    router.sampled_tokens(5, SampledToken(15, -1.0), dispatch=TARGET)
    assert router.delivered() == [10, 11, 12, 13, 14, 15]


def test_a_request_moves_again() -> None:
    router = MovingRouter()
    router.ask()
    router.tokens(4, 14, dispatch=TARGET)
    router.moved()
    router.join("D3", ServiceRole.DECODE)
    router.report("D3", takes_moves=True)
    router.notice(TARGET, None)
    assert router.of(events.StartMove)[-1].worker_id == "D2"
    router.tokens(5, *range(15, 30), dispatch="r#3")
    router.decoded("r#3")
    assert router.outcome().num_moves == 2


@pytest.mark.parametrize("loss", [events.WorkerLost("P", "its role changes"), events.TokenStreamLost("P", "reset")])
def test_a_request_goes_on_after_the_loss_of_the_target_that_had_computed_its_prompt(loss: events.RouterEvent) -> None:
    """P has become a decode worker meanwhile."""
    router = MovingRouter()
    router.report("D2", state=WorkerState.DRAINING)
    router.post(events.WorkerLost("P", "its role changes"))
    router.join("P", ServiceRole.DECODE)
    router.report("P", takes_moves=True)
    router.ask()
    router.tokens(4, 14, dispatch=TARGET)
    router.moved()
    router.report("D2")
    router.post(loss)
    router.pass_time(1.0)
    assert router.dispatches()[-1][0] == "r#3"


def test_a_move_that_fails_is_no_fault_of_the_worker_that_computed_the_prompt() -> None:
    router = MovingRouter()
    router.ask()
    router.notice(SOURCE, 4)
    router.decode_fails(WorkerUnavailable("D1 died"))
    router.target_fails()
    assert router.machine._requests["r"].failed_workers == {"D1", "D2"}


@pytest.mark.parametrize(
    "target",
    [
        {"takes_moves": False},
        {"takes_moves": True, "state": WorkerState.DRAINING},
        {"takes_moves": True, "ledger": {Column.FREE: 6, Column.HELD: 58}},
    ],
)
def test_without_a_worker_that_has_room_to_the_end_the_request_stays(target: dict[str, object]) -> None:
    router = MovingRouter()
    router.report("D2", **target)  # type: ignore[arg-type]
    assert router.ask() == []
    assert router.machine.view.num_moves() == {MoveOutcome(MoveReason.DRAIN, "no_room"): 1}
    router.report("D2", takes_moves=True, ledger={Column.FREE: 7, Column.HELD: 57})
    assert router.ask(), "28 tokens, of which the last one needs no slot"


def test_a_sequence_that_could_stay_moves_only_where_a_tenth_of_the_pool_stays_free() -> None:
    router = MovingRouter()
    router.report("D2", takes_moves=True, ledger={Column.FREE: 13, Column.HELD: 51})
    assert router.ask(MoveReason.ROOM) == [], "7 blocks for the sequence, and 6.4 of the pool's 64"
    router.report("D2", takes_moves=True, ledger={Column.FREE: 14, Column.HELD: 50})
    assert router.ask(MoveReason.ROOM)


def test_a_request_moves_at_most_twice_for_lack_of_room_and_still_leaves_a_worker_that_drains() -> None:
    router = MovingRouter()
    router.report("D1", takes_moves=True)
    for number in range(MAX_ROOM_MOVES):
        source, target = f"r#{number + 1}", f"r#{number + 2}"
        assert router.ask(MoveReason.ROOM, source)
        router.notice(source, 4 + number)
        router.tokens(4 + number, 14 + number, dispatch=target)
    last = f"r#{MAX_ROOM_MOVES + 1}"
    assert router.ask(MoveReason.ROOM, last) == []
    assert router.ask(MoveReason.DRAIN, last)


def test_the_room_of_a_target_is_counted_before_it_reports() -> None:
    router = MovingRouter()
    router.report("D2", takes_moves=True, ledger={Column.FREE: 10, Column.HELD: 54})
    router.ask()
    record = router.machine.workers.get("D2")
    assert record is not None
    assert record.view.num_free_blocks == 3


def test_a_full_target_is_asked_again_and_another_failure_avoids_it() -> None:
    router = MovingRouter()
    router.ask()
    router.decode_fails(QueueFull("full"), TARGET)
    router.report("D2", takes_moves=True)
    assert router.ask()[0].worker_id == "D2"  # type: ignore[union-attr]


# ---- workers that drain


def test_a_call_that_a_draining_worker_has_not_begun_counts_no_attempt() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    router.arrive()
    router.decode_fails(WorkerDrains("not begun"), "r#1")
    assert router.dispatches()[-1] == ("r#2", "P", "D2")
    router.first_token(11, dispatch="r#2")
    router.tokens(1, 12, 13, 14, dispatch="r#2")
    router.decoded("r#2")
    outcome = router.only(events.Finish).outcome
    assert (outcome.attempts, outcome.path) == (1, RequestPath.DISAGGREGATED)


def test_tokens_that_are_computed_again_are_counted() -> None:
    router = DrivenRouter(decode=("D1", "D2"))
    router.arrive()
    router.first_token(11)
    router.tokens(1, 12)
    router.decode_fails(WorkerUnavailable("died"))
    result = events.PrefillResult(2, SampledToken(13), None, 8, 0.0, 0.0)
    router.post(events.PrefillReturned("r#2", result))
    router.tokens(3, 14, dispatch="r#2")
    router.decoded("r#2", num_tokens=2)
    outcome = router.only(events.Finish).outcome
    assert outcome.recomputed_tokens == 2, "ten tokens, of which eight were cached"
