"""The hand-offs of a decode worker: pulled blocks in, tokens out."""

from __future__ import annotations

import pytest

from core.config import SchedulerConfig
from core.errors import TransferFailed
from core.handoff import AbortReason, Want
from core.lifecycle import FinishReason, Stage
from decode_worker.events import DecodeDone, DecodeFailed
from kv_transfer.protocol.events import PeerLost, ReadFailed, StartRead
from tests.support.driven_worker import EOS, request
from tests.unit.decode_worker.driven_decode import Decode


def test_a_hand_off_takes_each_block_when_it_is_announced_and_decodes_from_the_second_token() -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=3))
    assert worker.wanted() == (0, 1)
    assert worker.ledger == {}
    worker.ready(0)
    assert worker.ledger == {"incoming": 1}
    assert len(worker.of(StartRead)) == 1, "the pull starts while the prefill worker still computes"
    worker.ready(1, first_block=1, token=20)
    assert worker.ledger == {"incoming": 2}
    worker.finish_reads()
    assert worker.ledger == {"held": 2}
    assert worker.emitted("a") == [20]
    assert worker.chunks() == [("a", 6, 1)], "more than the first token is computed"
    worker.run_until_idle()
    assert worker.emitted("a") == [20, 7, 8]
    assert worker.only(DecodeDone).finish_reason is FinishReason.LENGTH
    assert worker.ledger == {}
    assert worker.machine.idle


def test_the_answer_has_the_times_of_the_stages_and_the_pulled_blocks() -> None:
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


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 20, FinishReason.LENGTH), (4, EOS, FinishReason.STOP)])
def test_a_pulled_first_token_may_end_the_request(max_tokens: int, token: int, reason: FinishReason) -> None:
    worker = Decode()
    worker.arrive(request("a", 6, max_tokens=max_tokens))
    worker.pull(token=token)
    assert worker.emitted("a") == [token]
    assert worker.only(DecodeDone).finish_reason is reason
    assert not worker.plans
    assert worker.ledger == {}


def test_hand_offs_get_their_blocks_in_order_of_arrival() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive(request("a", 12, max_tokens=2), ticket=1)
    worker.ready_all(ticket=1)
    worker.arrive(request("b", 12, max_tokens=2, first=30), ticket=2)
    worker.arrive(request("c", 4, max_tokens=2, first=50), ticket=3)
    assert [want.transfer_id for want in worker.sent(Want)] == [1], "c would fit, but b comes first"
    assert worker.machine.load().num_pulls_waiting == 2
    worker.run_steps_and_reads()
    assert [want.transfer_id for want in worker.sent(Want)] == [1, 2, 3]


def test_a_pull_leaves_the_next_block_of_each_running_sequence_free() -> None:
    worker = Decode(num_blocks=5)
    worker.arrive(request("pulls", 12, max_tokens=4, first=30))
    worker.arrive_alone(request("runs", 7, max_tokens=4))  # 2 blocks now, a third block soon
    worker.ready_all()
    assert worker.ledger == {"held": 2, "incoming": 2}, "with no block left, the running sequence would be preempted"
    worker.run_steps_and_reads()
    assert worker.finished() == {"pulls", "runs"}
    assert worker.core.scheduler.num_preemptions == 0


def test_a_hand_off_does_not_overtake_a_prompt_that_waits_for_blocks() -> None:
    worker = Decode(num_blocks=6)
    worker.arrive_alone(request("runs", 12, max_tokens=8))
    worker.arrive_alone(request("waits", 16, max_tokens=4, first=30))  # has no block yet
    worker.arrive(request("pulls", 4, max_tokens=4, first=50))
    assert [sequence.sequence_id for sequence in worker.core.scheduler.waiting] == ["waits"]
    assert not worker.is_wanted(1)
    worker.run_until_idle()
    assert worker.emitted("waits") == [16, 17, 18, 19]
    assert worker.is_wanted(1)


def test_a_full_queue_does_not_refuse_a_pulled_sequence() -> None:
    worker = Decode(scheduler=SchedulerConfig(max_batched_tokens=8, max_running=1, max_waiting=1))
    worker.arrive_alone(request("runs", 4, max_tokens=8))
    worker.arrive(request("pulls", 4, max_tokens=4, first=30))
    worker.arrive_alone(request("waits", 4, max_tokens=4, first=50))
    worker.pull()
    worker.run_until_idle()
    assert worker.emitted("pulls") == [20, 5, 6, 7]


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
    assert worker.ledger == {"held": 2}
    worker.ready_all()
    assert worker.ledger == {"held": 2, "incoming": 2}
    worker.finish_reads()
    worker.run_until_idle()
    assert worker.of(DecodeDone)[-1].cached_tokens == 8
    assert worker.emitted("a") == [20, 15]


def test_with_a_full_prefix_hit_only_the_first_token_is_pulled() -> None:
    worker = Decode()
    serve_a_prompt(worker, 8)
    num_reads = len(worker.of(StartRead))
    worker.arrive(request("a", 8, max_tokens=2), ticket=1)
    assert worker.wanted() == ()
    worker.ready(token=33)
    assert len(worker.of(StartRead)) == num_reads
    worker.run_until_idle()
    assert worker.emitted("a") == [33, 9]


def test_a_failed_pull_frees_its_blocks_and_fails_the_call_with_a_retryable_error() -> None:
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


def test_a_lost_owner_fails_its_hand_offs_and_targets_stay_reserved_until_their_reads_end() -> None:
    worker = Decode()
    worker.arrive(request("a", 6), ticket=1)
    worker.arrive(request("b", 6, first=30), ticket=2)
    worker.ready(0, ticket=1)
    worker.post(PeerLost(worker.peer.name, "connection reset"))
    assert [failed.request_id for failed in worker.of(DecodeFailed)] == ["a", "b"]
    assert worker.ledger == {"incoming": 1}
    worker.post(ReadFailed(worker.of(StartRead)[0].read_id, AbortReason.PEER_LOST, "gone"))
    assert [failed.request_id for failed in worker.of(DecodeFailed)] == ["a", "b"]
    assert worker.ledger == {}


def test_preempted_pulled_prompts_are_recomputed_with_the_same_tokens() -> None:
    worker = Decode(num_blocks=5)
    worker.arrive(request("a", 8, max_tokens=8), ticket=1)
    worker.arrive(request("b", 8, max_tokens=8, first=30), ticket=2)
    worker.ready_all(ticket=1)
    worker.ready_all(ticket=2)
    worker.finish_reads()
    worker.run_until_idle()
    assert worker.core.scheduler.num_preemptions > 0
    assert worker.emitted("a") == worker.emitted("b") == [20, 9, 10, 11, 12, 13, 14, 15]
    assert worker.ledger == {}
