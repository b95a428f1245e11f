"""Calls of a decode worker: local prefill, cancels, deadlines, refusals and drains. test_machine.py tests hand-offs."""

from __future__ import annotations

import pytest

from core.config import SchedulerConfig, WorkerConfig
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    QueueFull,
    RequestCancelled,
    TransferFailed,
    WorkerUnavailable,
)
from core.handoff import AbortReason, Release, Want
from core.kv_layout import KVLayout
from core.lifecycle import Stage, WorkerState
from core.scheduling.block_pool import Column
from core.scheduling.ledger import SequenceState
from decode_worker.events import DecodeArrived, DecodeCancelled, DecodeDone, DecodeFailed
from tests.support.driven_worker import LAYOUT, address, request
from tests.unit.decode_worker.driven_decode import Decode
from worker.core import ConfigChanged, DrainRequested

# ---- prefill on the decode worker


def test_a_call_without_a_source_computes_its_prompt() -> None:
    worker = Decode()
    worker.arrive_alone(request("a", 10, max_tokens=3))
    assert worker.chunks() == [("a", 0, 8)]
    worker.run_until_idle()
    assert worker.emitted("a") == [10, 11, 12]
    done = worker.only(DecodeDone)
    assert done.pull is None
    assert [stage for stage, _, _ in done.timeline.history] == [Stage.QUEUE, Stage.PREFILL, Stage.DECODE]


# ---- cancellation and deadlines


def test_the_claim_of_a_pulled_sequence_shows_its_state() -> None:
    worker = Decode()
    worker.arrive(request("a", 8))
    worker.ready(0, 1, token=20)

    def states() -> list[SequenceState]:
        return [claim.state for claim in worker.machine.claims() if isinstance(claim.state, SequenceState)]

    assert states() == [SequenceState.TRANSFER]
    worker.post(DecodeCancelled("a"))
    assert states() == [SequenceState.ENDING], "a read still writes to its blocks"
    worker.finish_reads()
    assert states() == []


def test_a_call_cancelled_while_it_waits_for_blocks_does_not_hold_up_the_next() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive(request("a", 12), ticket=1)
    worker.ready_all(ticket=1)
    worker.arrive(request("b", 12, first=30), ticket=2)
    worker.arrive(request("c", 4, first=50), ticket=3)
    worker.post(DecodeCancelled("b"))
    assert isinstance(worker.only(DecodeFailed).error, RequestCancelled)
    assert worker.sent(Release)[-1].transfer_id == 2
    assert [want.transfer_id for want in worker.sent(Want)] == [1, 3]


def test_a_call_cancelled_during_its_reads_keeps_the_target_blocks_until_they_end() -> None:
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


def test_a_call_cancelled_in_mid_stream_emits_no_more_tokens() -> None:
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
def test_the_deadline_ends_a_call_in_every_stage_and_the_error_names_the_stage(stage: str) -> None:
    worker = Decode(num_blocks=4)
    if stage == "queue":
        worker.arrive(request("before", 16, max_tokens=1, first=30), ticket=9)
        worker.ready_all(ticket=9)
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


def test_a_refused_call_leaves_no_state() -> None:
    worker = Decode(num_blocks=4, max_pulls_waiting=1)
    other = KVLayout("m", "bfloat16", 1, 1, LAYOUT.block_size, 1)
    with pytest.raises(InvalidRequest, match="KV blocks"):
        worker.arrive(request("large", 14, max_tokens=4), ticket=5)
    with pytest.raises(LayoutMismatch, match="dtype"):
        worker.post(DecodeArrived(request("a", 4), (6, address("other", layout=other)), worker.now + 9))
    worker.arrive(request("a", 13), ticket=1)
    worker.ready_all(ticket=1)
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


def test_hand_offs_beyond_a_lowered_limit_wait_on() -> None:
    worker = Decode(num_blocks=4, max_pulls_waiting=8)
    worker.arrive(request("holds all blocks", 13), ticket=1)
    worker.ready_all(ticket=1)
    for ticket in (2, 3):
        worker.arrive(request(f"r{ticket}", 4), ticket=ticket)
    limits = SchedulerConfig(max_batched_tokens=8, max_running=1)
    worker.post(ConfigChanged(limits, WorkerConfig(max_pulls_waiting=1)))
    with pytest.raises(QueueFull, match=r"1 hand-offs already wait for room \(max_pulls_waiting\)"):
        worker.arrive(request("late", 4), ticket=4)
    assert worker.of(DecodeFailed) == []
    assert worker.machine.load().num_pulls_waiting == 2
    assert worker.core.scheduler.config is limits


def test_a_draining_worker_finishes_its_calls_and_refuses_new_ones() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=2))
    worker.post(DrainRequested())
    assert worker.machine.load().state is WorkerState.DRAINING
    with pytest.raises(WorkerUnavailable, match="drains"):
        worker.arrive_alone(request("b", 4))
    worker.pull()
    worker.run_until_idle()
    assert worker.only(DecodeDone).request_id == "a"
    assert worker.machine.idle
