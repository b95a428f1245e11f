"""The prefill worker: prompts in, offers and one first token out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import SchedulerConfig
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutOfDeviceMemory,
    QueueFull,
    TransferFailed,
    WorkerUnavailable,
)
from core.handoff import Abort, AbortReason, Heartbeat, HeartbeatEntry, Ready
from core.lifecycle import FinishReason, Stage, WorkerState
from core.machine import Tick
from prefill_worker.machine import MAX_STALL_S, PrefillCancelled, PrefillDone, PrefillFailed
from tests.support.driven_worker import EOS, request
from tests.unit.prefill_worker.driven_prefill import Prefill
from worker.core import DrainRequested

# ---- offers


def test_each_chunk_offers_its_full_blocks_and_the_last_chunk_also_the_first_token() -> None:
    worker = Prefill()
    worker.arrive(request("a", 18))
    worker.want(0, 1, 2, 3, 4)
    assert worker.chunks() == [("a", 0, 8)]
    worker.finish_step()
    assert worker.offered() == [0, 1]
    worker.finish_step()
    assert worker.offered() == [0, 1, 2, 3]
    assert not any(ready.last for ready in worker.sent(Ready))
    worker.finish_step()
    assert worker.offered() == [0, 1, 2, 3, 4], "the last block is half full"
    assert (worker.sent(Ready)[-1].last, worker.sent(Ready)[-1].token_ids) == (True, (18,))


def test_the_answer_has_the_first_token_and_no_finish_reason() -> None:
    worker = Prefill()
    worker.arrive(request("a", 6))
    worker.now += 2.0
    worker.finish_step()
    done = worker.only(PrefillDone)
    assert (done.request_id, done.index, done.token.token_id, done.finish_reason) == ("a", 0, 6, None)
    assert done.timeline.seconds_in(Stage.PREFILL) == 2.0
    assert not worker.plans, "a prefill worker samples only one token"


def test_blocks_stay_leased_after_the_answer_until_the_reader_releases_them() -> None:
    worker = Prefill()
    worker.arrive(request("a", 6))
    worker.want(0, 1)
    worker.finish_step()
    assert worker.ledger == {"leased": 2}
    assert not worker.machine.idle
    worker.release()
    assert worker.ledger == {}
    assert worker.machine.idle


def test_a_cached_prefix_is_offered_and_counted() -> None:
    worker = Prefill()
    worker.arrive(request("a", 8))
    worker.want(0, 1)
    worker.finish_step()
    worker.release()
    worker.arrive(request("b", 10), ticket=2)
    worker.want(0, 1, 2, ticket=2)
    assert worker.chunks() == [("b", 8, 2)]
    worker.finish_step()
    assert worker.offered()[2:] == [0, 1, 2]
    assert worker.of(PrefillDone)[1].cached_tokens == 8


# ---- ends


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 9, FinishReason.LENGTH), (4, EOS, FinishReason.STOP)])
def test_a_first_token_that_ends_the_request_does_not_abort_the_offer(
    max_tokens: int, token: int, reason: FinishReason
) -> None:
    worker = Prefill()
    worker.arrive(request("a", 6, max_tokens=max_tokens))
    worker.want(0, 1)
    worker.finish_step(a=token)
    assert worker.only(PrefillDone).finish_reason is reason
    assert not worker.sent(Abort), "an abort could overtake the answer and cause a needless retry"
    worker.release(reason=AbortReason.CANCELLED)
    assert worker.ledger == {}


def test_a_call_cancelled_during_a_step_keeps_its_blocks_until_the_step_ends() -> None:
    worker = Prefill()
    worker.arrive(request("a", 16))
    worker.want(0, 1, 2, 3)
    worker.post(PrefillCancelled("a"))
    assert worker.only(PrefillFailed).request_id == "a"
    assert worker.ledger == {"held": 2}
    worker.finish_step()
    assert worker.ledger == {}
    assert worker.offered() == [], "blocks of a cancelled prompt are offered"
    assert worker.machine.idle


def test_cancelling_an_ended_call_does_nothing() -> None:
    worker = Prefill()
    worker.arrive(request("a", 6))
    worker.finish_step()
    assert worker.post(PrefillCancelled("a")) == []
    assert worker.post(PrefillCancelled("never heard of")) == []


def test_the_deadline_ends_a_call_in_the_queue_and_in_a_step() -> None:
    worker = Prefill()
    worker.arrive(request("a", 16), timeout_s=3.0)
    worker.arrive(request("b", 16, first=30), ticket=2, timeout_s=3.0)
    worker.pass_time(3.1)
    assert [type(failed.error) for failed in worker.of(PrefillFailed)] == [DeadlineExceeded] * 2
    worker.finish_step()
    assert worker.ledger == {}
    assert worker.of(PrefillDone) == []


def test_a_failed_step_ends_only_its_own_calls() -> None:
    worker = Prefill(scheduler=SchedulerConfig(max_batched_tokens=8, max_running=1, max_waiting=8))
    worker.arrive(request("a", 6))
    worker.arrive(request("b", 6, first=30), ticket=2)
    worker.fail_step()
    assert worker.only(PrefillFailed).request_id == "a"
    assert worker.sent(Abort)[-1].reason is AbortReason.PREFILL_FAILED
    worker.finish_step()
    assert worker.only(PrefillDone).request_id == "b"


def test_a_prompt_without_memory_ends_alone_and_its_chunk_is_not_offered() -> None:
    worker = Prefill(scheduler=SchedulerConfig(max_batched_tokens=16, max_running=4, max_waiting=8))
    worker.arrive(request("short", 4), ticket=1)
    worker.arrive(request("long", 12, first=30), ticket=2)
    worker.want(0, ticket=1)
    worker.want(0, 1, 2, ticket=2)
    worker.finish_step("long")
    failed = worker.only(PrefillFailed)
    assert failed.request_id == "long"
    assert isinstance(failed.error, OutOfDeviceMemory)
    assert worker.sent(Abort)[-1].reason is AbortReason.PREFILL_FAILED
    assert worker.only(PrefillDone).request_id == "short"
    worker.release(ticket=1)
    worker.release(ticket=2, reason=AbortReason.PREFILL_FAILED)
    assert worker.ledger == {}
    assert worker.machine.idle


def test_the_first_token_is_computed_even_if_the_reader_gives_up() -> None:
    worker = Prefill()
    worker.arrive(request("a", 16))
    worker.want(0, 1, 2, 3)
    worker.finish_step()
    worker.release(reason=AbortReason.CANCELLED)
    worker.finish_step()
    assert worker.only(PrefillDone).token.token_id == 16
    assert worker.ledger == {}


# ---- refusals


def test_a_refused_call_leaves_no_state() -> None:
    worker = Prefill(num_blocks=4, scheduler=SchedulerConfig(max_batched_tokens=4, max_running=1, max_waiting=1))
    with pytest.raises(InvalidRequest, match="KV blocks"):
        worker.arrive(request("large", 17))
    with pytest.raises(InvalidRequest, match="has no adapters"):
        worker.arrive(replace(request("adapted", 8), adapter="red"))
    worker.arrive(request("a", 8))
    with pytest.raises(InvalidRequest, match="served already"):
        worker.arrive(request("a", 8), ticket=2)
    with pytest.raises(TransferFailed, match="offered before"):
        worker.arrive(request("b", 4), ticket=1)
    worker.arrive(request("c", 4), ticket=3)
    with pytest.raises(QueueFull):
        worker.arrive(request("d", 4), ticket=4)
    worker.machine.check()
    assert worker.of(PrefillFailed) == []
    assert worker.machine.load().num_waiting == 1


def test_the_id_of_a_cancelled_call_is_refused_until_its_step_ends() -> None:
    worker = Prefill()
    worker.arrive(request("a", 8))
    worker.post(PrefillCancelled("a"))
    with pytest.raises(InvalidRequest, match="served already"):
        worker.arrive(request("a", 8), ticket=2)
    worker.finish_step()
    worker.arrive(request("a", 8), ticket=3)
    worker.finish_step()
    assert worker.only(PrefillDone).request_id == "a"


def test_a_draining_worker_finishes_its_calls_and_refuses_new_ones() -> None:
    worker = Prefill()
    worker.arrive(request("a", 6))
    worker.post(DrainRequested())
    assert worker.machine.load().state is WorkerState.DRAINING
    with pytest.raises(WorkerUnavailable, match="drains"):
        worker.arrive(request("b", 6), ticket=2)
    worker.want(0, 1)
    assert not worker.machine.idle, "a call is open"
    worker.finish_step()
    assert worker.only(PrefillDone).request_id == "a"
    assert not worker.machine.idle, "a reader has a lease"
    worker.release()
    assert worker.machine.idle


# ---- deadlocks of prompts and readers


def blocked_by_an_unread_offer() -> Prefill:
    """The reader of `a` has no target blocks. The reader of `b` has, but `b` lacks blocks to be computed."""
    worker = Prefill(num_blocks=5)
    worker.arrive(request("a", 16))
    worker.finish_step()
    worker.finish_step()
    worker.arrive(request("b", 16, first=30), ticket=2)
    worker.want(0, 1, 2, 3, ticket=2)
    while worker.plans:
        worker.finish_step()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a"]
    return worker


def test_an_offer_without_a_want_is_withdrawn_for_a_prompt_with_a_waiting_reader() -> None:
    worker = blocked_by_an_unread_offer()
    worker.pass_time(MAX_STALL_S + 0.1)
    aborted = worker.sent(Abort)[-1]
    assert (aborted.transfer_id, aborted.reason) == (1, AbortReason.OVERLOADED)
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b"]


def lack_blocks(worker: Prefill, ticket: int, num_unplaced: int) -> None:
    """A heartbeat of the reader."""
    entry = HeartbeatEntry(ticket, 4, num_unplaced)
    worker.hear(lambda i, c: Heartbeat(i, c, None, (entry,)))


def test_an_offer_whose_reader_lacks_blocks_is_withdrawn() -> None:
    worker = blocked_by_an_unread_offer()
    worker.want(0, 1, 2, 3, ticket=1)
    lack_blocks(worker, 1, 3)
    worker.pass_time(MAX_STALL_S + 0.1)
    assert [(abort.transfer_id, abort.reason) for abort in worker.sent(Abort)] == [(1, AbortReason.OVERLOADED)]
    worker.release(reason=AbortReason.OVERLOADED)
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b"]


@pytest.mark.parametrize("unplaced", [{}, {1: (3, 0)}, {2: (1,)}], ids=["wanted", "got its blocks", "of highest rank"])
def test_an_offer_that_is_wanted_is_not_withdrawn_while_its_reader_has_blocks(
    unplaced: dict[int, tuple[int, ...]],
) -> None:
    """`unplaced`: what the heartbeats of the reader of each offer say, in order."""
    worker = blocked_by_an_unread_offer()
    worker.pass_time(MAX_STALL_S / 2)
    worker.post(Tick())
    assert worker.sent(Abort) == []
    worker.want(0, 1, 2, 3, ticket=1)
    for ticket, counts in unplaced.items():
        for num_unplaced in counts:
            lack_blocks(worker, ticket, num_unplaced)
    worker.pass_time(5 * MAX_STALL_S if unplaced else MAX_STALL_S)
    assert worker.sent(Abort) == []
    worker.release()
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b"]


def test_each_stall_has_its_own_time_limit() -> None:
    worker = blocked_by_an_unread_offer()
    worker.pass_time(MAX_STALL_S / 2)
    worker.release()
    worker.run_until_idle()
    worker.release(ticket=2)
    worker.pass_time(5 * MAX_STALL_S)
    worker.arrive(request("c", 16, first=60), ticket=3)
    worker.run_until_idle()
    worker.arrive(request("d", 16, first=90), ticket=4)
    worker.want(0, 1, 2, 3, ticket=4)
    worker.run_until_idle()
    worker.pass_time(0.9 * MAX_STALL_S)
    assert worker.sent(Abort) == []
    worker.pass_time(0.2 * MAX_STALL_S)
    assert [abort.transfer_id for abort in worker.sent(Abort)] == [3]


def test_no_offer_is_withdrawn_while_no_reader_waits_for_a_prompt() -> None:
    worker = Prefill(num_blocks=5)
    worker.arrive(request("a", 16))
    worker.run_until_idle()
    worker.arrive(request("b", 16, first=30), ticket=2)
    worker.run_until_idle()
    worker.pass_time(5 * MAX_STALL_S)
    assert worker.sent(Abort) == []


def test_if_every_offer_is_wanted_the_unfinished_prompt_of_lowest_rank_is_withdrawn() -> None:
    worker = Prefill(num_blocks=6)
    worker.arrive(request("x", 8, first=60), ticket=3)
    worker.want(0, 1, ticket=3)
    worker.finish_step()
    worker.arrive(request("low", 20, first=30), ticket=2)
    worker.want(0, 1, 2, 3, 4, ticket=2)
    worker.run_until_idle()
    sequence = worker.core.scheduler.get("low")
    assert sequence is not None
    worker.core.scheduler.preempt(sequence)
    worker.arrive(request("high", 16, priority=-1), ticket=1)
    worker.want(0, 1, 2, 3, ticket=1)
    worker.release(ticket=3)
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["x"], "the reader of `low` keeps four blocks"
    worker.pass_time(MAX_STALL_S + 0.1)
    (aborted,) = worker.sent(Abort)
    assert (aborted.transfer_id, aborted.reason) == (2, AbortReason.OVERLOADED)
    worker.release(ticket=2, reason=AbortReason.OVERLOADED)
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)][:2] == ["x", "high"]


def test_a_preempted_prompt_offers_each_block_once() -> None:
    worker = Prefill(num_blocks=6)
    worker.arrive(request("x", 8, first=30), ticket=2)
    worker.run_until_idle()
    worker.arrive(request("a", 20))
    worker.want(0, 1, 2, 3, 4)
    worker.run_until_idle()
    assert worker.offered() == [0, 1, 2, 3], "the last block is missing, because the reader of `x` keeps two"
    sequence = worker.core.scheduler.get("a")
    assert sequence is not None
    worker.core.scheduler.preempt(sequence)
    assert worker.ledger == {"leased": 6}, "announced blocks stay leased"
    worker.release(ticket=2)
    assert worker.chunks() == [("a", 16, 4)], "the leased blocks are not used as cached prefix"
    worker.finish_step()
    assert worker.offered() == [0, 1, 2, 3, 4], "a position was offered twice"
    assert worker.sent(Ready)[-1].last
