"""The decode worker: pulled blocks in, tokens out."""

from __future__ import annotations

from functools import partial

import pytest

from core.block_pool import Column
from core.config import SchedulerConfig
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    QueueFull,
    RequestCancelled,
    TransferFailed,
    WorkerUnavailable,
)
from core.handoff import Abort, AbortReason, OfferedBlocks, Ready, Release, Want
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason, Stage, WorkerState
from core.request import Request
from core.worker import DrainRequested
from decode_worker.machine import (
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeFailed,
    DecodeMachine,
    EmitTokens,
)
from kv_transfer.events import PeerLost, ReadFailed, ReadFinished, ReadTimedOut, StartRead
from tests.support.driven_worker import EOS, LAYOUT, LEASE_S, DrivenWorker, address, request


class Decode(DrivenWorker):
    def __init__(
        self, num_blocks: int = 16, max_pulls_waiting: int = 4, scheduler: SchedulerConfig | None = None
    ) -> None:
        super().__init__(partial(DecodeMachine, max_pulls_waiting=max_pulls_waiting), num_blocks, scheduler)

    def arrive(self, arriving: Request, ticket: int = 1, timeout_s: float = 60.0) -> list[object]:
        return self.post(DecodeArrived(arriving, (ticket, self.peer), self.now + timeout_s))

    def arrive_alone(self, arriving: Request, timeout_s: float = 60.0) -> list[object]:
        return self.post(DecodeArrived(arriving, None, self.now + timeout_s))

    def wanted(self, ticket: int = 1) -> tuple[int, ...]:
        """Positions that the newest WANT asks for."""
        return next(want.positions for want in reversed(self.sent(Want)) if want.transfer_id == ticket)

    def ready(self, *positions: int, ticket: int = 1, first_block: int = 0, token: int | None = None) -> list[object]:
        """The owner announces positions; with a `token` they are the last. It keeps position p in its block p."""
        ack = next(want.counter for want in reversed(self.sent(Want)) if want.transfer_id == ticket)
        blocks = OfferedBlocks.of((position, position, 0) for position in positions)
        return self.hear(lambda i, c: Ready(ticket, i, c, ack, first_block, blocks, token is not None, token))

    def finish_reads(self) -> None:
        ended = getattr(self, "_reads_ended", 0)
        reads = self.of(StartRead)[ended:]
        self._reads_ended = ended + len(reads)
        for read in reads:
            self.post(ReadFinished(read.read_id, ()))

    def pull(self, ticket: int = 1, token: int = 20) -> None:
        """The whole hand-off."""
        self.ready(*self.wanted(ticket), ticket=ticket, token=token)
        self.finish_reads()

    def emitted(self, name: str) -> list[int]:
        """Token ids of a call, after checking that indices are without a gap."""
        tokens: list[int] = []
        first = None
        for action in self.of(EmitTokens):
            if action.request_id == name:
                first = action.index if first is None else first
                assert action.index == first + len(tokens)
                tokens += [token.token_id for token in action.tokens]
        return tokens


# ---- hand-offs


def test_a_hand_off_reserves_its_blocks_pulls_them_and_decodes_from_the_second_token_on() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=3))
    assert worker.wanted() == (0, 1)
    assert worker.ledger == {"incoming": 2}
    worker.ready(0)
    assert len(worker.of(StartRead)) == 1, "it pulls while prefill still computes"
    worker.ready(1, first_block=1, token=20)
    worker.finish_reads()
    assert worker.ledger == {"held": 2}
    assert worker.emitted("a") == [20]
    assert worker.chunks() == [("a", 6, 1)], "only the first token is left to compute"
    worker.run_until_idle()
    assert worker.emitted("a") == [20, 7, 8]
    assert worker.only(DecodeDone).finish_reason is FinishReason.LENGTH
    assert worker.ledger == {}
    assert worker.machine.idle


def test_the_answer_says_where_the_time_went_and_what_was_pulled() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=2))
    worker.now += 2.0
    worker.pull()
    worker.now += 1.0
    worker.run_until_idle()
    done = worker.only(DecodeDone)
    assert (done.timeline.seconds_in(Stage.TRANSFER), done.timeline.seconds_in(Stage.DECODE)) == (2.0, 1.0)
    assert done.pull is not None
    assert done.pull.num_blocks == 2


def test_a_resumed_request_goes_on_at_its_own_index() -> None:
    worker = Decode()
    worker.arrive(request("a", 4, max_tokens=4, resumed=(40, 41)))
    worker.pull(token=42)
    worker.run_until_idle()
    assert worker.of(EmitTokens)[0].index == 2
    assert worker.emitted("a") == [42, 7]


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 20, FinishReason.LENGTH), (4, EOS, FinishReason.STOP)])
def test_a_first_token_that_ends_the_request_ends_it_here_too(
    max_tokens: int, token: int, reason: FinishReason
) -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=max_tokens))
    worker.pull(token=token)
    assert worker.emitted("a") == [token]
    assert worker.only(DecodeDone).finish_reason is reason
    assert worker.plan is None
    assert worker.ledger == {}


def test_hand_offs_get_their_blocks_in_order_of_arrival() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive(request("a", 12, max_tokens=2), ticket=1)
    worker.arrive(request("b", 12, max_tokens=2, first=30), ticket=2)
    worker.arrive(request("c", 4, max_tokens=2, first=50), ticket=3)
    assert [want.transfer_id for want in worker.sent(Want)] == [1], "c would fit, but b was first"
    assert worker.machine.load().num_pulls_waiting == 2
    worker.pull(ticket=1)
    worker.run_until_idle()
    assert [want.transfer_id for want in worker.sent(Want)] == [1, 2, 3]


def test_a_hand_off_leaves_the_next_block_of_each_running_sequence_free() -> None:
    worker = Decode(num_blocks=5)
    worker.arrive_alone(request("runs", 7, max_tokens=8))  # 2 blocks now, a third one soon
    worker.arrive(request("pulls", 12, max_tokens=4, first=30))  # the other 3
    assert worker.ledger == {"held": 2}, "all blocks would be taken, and the running one preempted for its next"
    worker.run_until_idle()
    assert worker.ledger == {"incoming": 3}


def test_a_hand_off_does_not_overtake_a_prompt_that_waits_for_blocks() -> None:
    worker = Decode(num_blocks=6)
    worker.arrive_alone(request("runs", 12, max_tokens=8))
    worker.arrive_alone(request("waits", 16, max_tokens=4, first=30))  # has no block yet
    worker.arrive(request("pulls", 4, max_tokens=4, first=50))
    assert [sequence.sequence_id for sequence in worker.core.scheduler.waiting] == ["waits"]
    assert "incoming" not in worker.ledger
    worker.run_until_idle()
    assert worker.emitted("waits") == [16, 17, 18, 19]
    assert worker.ledger == {"incoming": 1}


def test_a_pulled_sequence_never_finds_the_queue_full_when_its_kv_is_here() -> None:
    worker = Decode(scheduler=SchedulerConfig(max_batched_tokens=8, max_running=1, max_waiting=1))
    worker.arrive_alone(request("runs", 4, max_tokens=8))
    worker.arrive(request("pulls", 4, max_tokens=4, first=30))
    worker.arrive_alone(request("waits", 4, max_tokens=4, first=50))
    worker.pull()
    worker.run_until_idle()
    assert worker.emitted("pulls") == [20, 5, 6, 7]


def test_a_hand_off_that_waits_keeps_the_owners_offer_alive() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive(request("a", 16, max_tokens=1), ticket=1)
    worker.arrive(request("b", 16, max_tokens=1, first=30), ticket=2)
    worker.pass_time(LEASE_S / 6 + 0.1)
    beats = [
        action.message for action in worker.actions if type(getattr(action, "message", None)).__name__ == "Heartbeat"
    ]
    assert {entry.transfer_id for entry in beats[-1].entries} == {1, 2}


def serve_a_prompt(worker: Decode, num_tokens: int) -> None:
    worker.arrive(request("before", num_tokens, max_tokens=2), ticket=99)
    worker.pull(ticket=99)
    worker.run_until_idle()
    assert worker.ledger == {}


def test_with_a_partial_prefix_hit_only_the_missing_blocks_are_pulled() -> None:
    worker = Decode()
    serve_a_prompt(worker, 9)
    worker.arrive(request("a", 14, max_tokens=2), ticket=1)
    assert worker.wanted() == (2, 3)
    assert worker.ledger == {"held": 2, "incoming": 2}
    worker.pull()
    worker.run_until_idle()
    assert worker.of(DecodeDone)[-1].cached_tokens == 8
    assert worker.emitted("a") == [20, 15]


def test_with_a_full_prefix_hit_nothing_but_the_first_token_is_pulled() -> None:
    worker = Decode()
    serve_a_prompt(worker, 8)
    num_reads = len(worker.of(StartRead))
    worker.arrive(request("a", 8, max_tokens=2), ticket=1)
    assert worker.wanted() == ()
    worker.ready(token=33)
    assert len(worker.of(StartRead)) == num_reads
    worker.run_until_idle()
    assert worker.emitted("a") == [33, 9]


def test_a_failed_pull_gives_its_blocks_back_and_the_router_a_retryable_error() -> None:
    worker = Decode()
    worker.arrive(request("a", 6))
    worker.ready(0)
    (read,) = worker.of(StartRead)
    worker.post(ReadFailed(read.read_id, AbortReason.READ_FAILED, "broken"))
    failed = worker.only(DecodeFailed)
    assert isinstance(failed.error, TransferFailed)
    assert failed.error.retryable
    assert "read_failed" in str(failed.error)
    assert worker.ledger == {}
    assert worker.machine.idle


def test_a_lost_owner_ends_all_hand_offs_from_it_and_targets_stay_until_their_reads_have_ended() -> None:
    worker = Decode()
    worker.arrive(request("a", 6), ticket=1)
    worker.arrive(request("b", 6, first=30), ticket=2)
    worker.ready(0, ticket=1)
    worker.post(PeerLost(worker.peer.name, "connection reset"))
    assert [failed.request_id for failed in worker.of(DecodeFailed)] == ["a", "b"]
    assert worker.ledger == {"incoming": 2}
    worker.post(ReadFailed(worker.of(StartRead)[0].read_id, AbortReason.PEER_LOST, "gone"))
    assert [failed.request_id for failed in worker.of(DecodeFailed)] == ["a", "b"]
    assert worker.ledger == {}


def test_a_read_without_end_fails_the_call_at_once_and_keeps_the_target_blocks() -> None:
    worker = Decode()
    worker.arrive(request("a", 6))
    worker.ready(0)
    (read,) = worker.of(StartRead)
    worker.post(ReadTimedOut(read.read_id, "no end after 2.0 s"))
    failed = worker.only(DecodeFailed)
    assert failed.error.retryable
    assert "no end after 2.0 s" in str(failed.error)
    assert worker.ledger == {"incoming": 2}
    assert not worker.machine.idle
    worker.post(ReadFailed(read.read_id, AbortReason.READ_FAILED, "cancelled"))
    assert worker.ledger == {}
    assert worker.machine.idle


def test_an_owner_that_gives_up_fails_the_call() -> None:
    worker = Decode()
    worker.arrive(request("a", 6))
    worker.hear(lambda i, c: Abort(1, i, c, AbortReason.PREFILL_FAILED))
    assert "prefill_failed" in str(worker.only(DecodeFailed).error)
    assert worker.sent(Release)[-1].transfer_id == 1


def test_pulled_prompts_that_were_preempted_are_recomputed_here_with_the_same_tokens() -> None:
    worker = Decode(num_blocks=5)
    worker.arrive(request("a", 8, max_tokens=8), ticket=1)
    worker.arrive(request("b", 8, max_tokens=8, first=30), ticket=2)
    worker.pull(ticket=1)
    worker.pull(ticket=2)
    worker.run_until_idle()
    assert worker.core.scheduler.num_preemptions > 0
    assert worker.emitted("a") == worker.emitted("b") == [20, 9, 10, 11, 12, 13, 14, 15]
    assert worker.ledger == {}


# ---- the prompt computed here


def test_without_a_source_the_prompt_is_computed_here() -> None:
    worker = Decode()
    worker.arrive_alone(request("a", 10, max_tokens=3))
    assert worker.chunks() == [("a", 0, 8)]
    worker.run_until_idle()
    assert worker.emitted("a") == [10, 11, 12]
    done = worker.only(DecodeDone)
    assert done.pull is None
    assert [stage for stage, _, _ in done.timeline.history] == [Stage.QUEUE, Stage.PREFILL, Stage.DECODE]


def test_decoding_goes_on_while_a_prompt_is_computed_in_chunks() -> None:
    worker = Decode()
    worker.arrive_alone(request("a", 4, max_tokens=8))
    worker.finish_step()
    worker.arrive_alone(request("b", 16, first=30))
    worker.finish_step()
    assert worker.chunks() == [("a", 5 + 0, 1), ("b", 0, 7)]


def test_a_failed_step_ends_the_calls_in_it() -> None:
    worker = Decode()
    worker.arrive_alone(request("a", 4))
    worker.fail_step()
    assert worker.only(DecodeFailed).request_id == "a"
    assert worker.ledger == {}
    worker.arrive_alone(request("b", 4, max_tokens=1))
    worker.run_until_idle()
    assert worker.only(DecodeDone).request_id == "b"


# ---- cancellation and deadlines


def test_a_call_cancelled_while_it_waits_for_blocks_leaves_the_others_their_turn() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive(request("a", 12), ticket=1)
    worker.arrive(request("b", 12, first=30), ticket=2)
    worker.arrive(request("c", 4, first=50), ticket=3)
    worker.post(DecodeCancelled("b"))
    assert isinstance(worker.only(DecodeFailed).error, RequestCancelled)
    assert worker.sent(Release)[-1].transfer_id == 2
    assert [want.transfer_id for want in worker.sent(Want)] == [1, 3]


def test_a_call_cancelled_during_its_reads_keeps_their_targets_until_they_have_ended() -> None:
    worker = Decode()
    worker.arrive(request("a", 8))
    worker.ready(0, 1, token=20)
    worker.post(DecodeCancelled("a"))
    assert worker.only(DecodeFailed).request_id == "a"
    assert worker.ledger == {"incoming": 2}
    assert worker.sent(Release) == []
    assert not worker.machine.idle
    worker.finish_reads()
    assert worker.ledger == {}
    assert worker.sent(Release)[-1].reason is AbortReason.CANCELLED
    assert worker.emitted("a") == []
    assert worker.machine.idle


def test_a_call_cancelled_during_a_step_keeps_its_blocks_until_the_step_has_ended() -> None:
    worker = Decode()
    worker.arrive_alone(request("a", 4))
    worker.post(DecodeCancelled("a"))
    assert worker.ledger == {"held": 1}
    worker.finish_step()
    assert worker.ledger == {}
    assert worker.emitted("a") == []


def test_a_call_cancelled_in_mid_stream_says_nothing_more() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=8))
    worker.pull()
    worker.finish_step()
    worker.post(DecodeCancelled("a"))
    worker.run_until_idle()
    assert worker.emitted("a") == [20, 7]
    assert len(worker.of(DecodeFailed)) == 1
    assert worker.of(DecodeDone) == []
    assert worker.post(DecodeCancelled("a")) == []


@pytest.mark.parametrize("stage", ["queue", "transfer", "prefill", "decode"])
def test_the_deadline_ends_a_call_in_every_stage_and_says_in_which(stage: str) -> None:
    worker = Decode(num_blocks=4)
    if stage == "queue":
        worker.arrive(request("before", 16, max_tokens=1, first=30), ticket=9)
    if stage == "prefill":
        worker.arrive_alone(request("a", 12), timeout_s=3.0)
    else:
        worker.arrive(request("a", 8), timeout_s=3.0)
    if stage == "decode":
        worker.pull()
    worker.pass_time(2.9)
    assert worker.of(DecodeFailed) == []
    worker.pass_time(0.2)
    (failed,) = worker.of(DecodeFailed)
    assert isinstance(failed.error, DeadlineExceeded)
    assert f"in stage {stage}" in str(failed.error)
    worker.run_until_idle()
    assert worker.pool.ledger()[Column.HELD] == 0


# ---- refusals


def test_what_cannot_be_taken_is_refused_without_a_trace() -> None:
    worker = Decode(num_blocks=4, max_pulls_waiting=1)
    other = KVLayout("m", "bfloat16", 1, 1, LAYOUT.block_size, 1)
    with pytest.raises(InvalidRequest, match="KV blocks"):
        worker.arrive(request("large", 14, max_tokens=4), ticket=5)
    with pytest.raises(LayoutMismatch, match="dtype"):
        worker.post(DecodeArrived(request("a", 4), (6, address("other", layout=other)), worker.now + 9))
    worker.arrive(request("a", 13), ticket=1)
    with pytest.raises(InvalidRequest, match="served already"):
        worker.arrive(request("a", 4), ticket=7)
    with pytest.raises(TransferFailed, match="pulled before"):
        worker.arrive(request("b", 4), ticket=1)
    worker.arrive(request("c", 4), ticket=2)
    with pytest.raises(QueueFull, match="max_pulls_waiting"):
        worker.arrive(request("d", 4), ticket=3)
    worker.machine.check()
    assert worker.of(DecodeFailed) == []
    assert worker.machine.load().num_pulls_waiting == 1


def test_a_draining_worker_finishes_what_it_has_and_refuses_the_rest() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=2))
    worker.post(DrainRequested())
    assert worker.machine.load().state is WorkerState.DRAINING
    with pytest.raises(WorkerUnavailable, match="draining"):
        worker.arrive_alone(request("b", 4))
    worker.pull()
    worker.run_until_idle()
    assert worker.only(DecodeDone).request_id == "a"
    assert worker.machine.idle
