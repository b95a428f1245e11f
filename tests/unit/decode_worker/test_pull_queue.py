"""Hand-offs take blocks when these are announced, in rank order, and never wait for each other in a circle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from core.config import RouterConfig, SchedulerConfig
from core.errors import TransferFailed
from core.handoff import AbortReason, Heartbeat, Release, Want
from core.lifecycle import ServiceRole
from core.machine import Tick
from decode_worker.events import DecodeCancelled, DecodeDone, DecodeFailed
from decode_worker.pull_queue import MAX_STALL_S
from kv_transfer.protocol.events import ReadFailed, StartRead
from router.routing.policy import RoutingQuestion, SecondsPolicy
from router.routing.worker_record import WorkerRecord
from tests.support.driven_worker import request
from tests.unit.decode_worker.driven_decode import Decode


def two_half_pulled(num_blocks: int = 9, second_priority: int = 0) -> Decode:
    """Pulls 1 and 2 of 6 blocks each, the first with 2 announced."""
    worker = Decode(num_blocks)
    worker.arrive(request("a", 24, max_tokens=2), ticket=1)
    worker.arrive(request("b", 24, max_tokens=2, first=100, priority=second_priority), ticket=2)
    worker.ready(0, 1, ticket=1)
    return worker


def announce(worker: Decode, ticket: int, first: int, end: int, token: int | None = None) -> None:
    """Positions [first, end) of a pull without a cached prefix."""
    worker.ready(*range(first, end), ticket=ticket, first_block=first, token=token)


def targets_of(worker: Decode) -> dict[str, int]:
    return {pull.sequence.sequence_id: len(pull.targets) for pull in worker.machine.pulls.by_id.values()}


def _answer(incarnation: int, counter: int, ack: int) -> Heartbeat:
    return Heartbeat(incarnation, counter, ack, ())


def failures(worker: Decode) -> list[str]:
    return [failed.request_id for failed in worker.of(DecodeFailed)]


# ---- as late as the pull needs them


def test_while_a_long_prompt_is_computed_others_use_the_pool() -> None:
    """The prompt needs 15 of 16 blocks, and the owner computes for 5 s."""
    worker = Decode(num_blocks=16)
    worker.arrive(request("long", 58, max_tokens=2))
    announce(worker, 1, 0, 2)
    worker.finish_reads()
    for second in range(5):
        worker.arrive(request(f"pulled{second}", 12, max_tokens=8, first=1000 * second + 100), ticket=10 + second)
        worker.arrive_alone(request(f"local{second}", 12, max_tokens=8, first=1000 * second + 500))
        worker.pull(ticket=10 + second)
        assert worker.machine.pulls.by_id[1].targets.keys() == {0, 1}
        worker.run_until_idle()
        assert worker.ledger == {"incoming": 2}
        worker.hear(partial(_answer, ack=10 + 2 * second))
        worker.now += 1.0
    assert len(worker.finished()) == 10
    announce(worker, 1, 2, 15, token=20)
    worker.run_steps_and_reads()
    assert "long" in worker.finished()


def test_the_load_tells_how_many_blocks_are_promised() -> None:
    worker = two_half_pulled()
    assert worker.machine.load().num_promised_blocks == 4 + 6
    assert worker.machine.load().num_pulls_waiting == 0
    announce(worker, 1, 2, 6, token=20)
    assert worker.machine.load().num_promised_blocks == 6
    worker.arrive(request("c", 24, first=300), ticket=3)
    assert worker.machine.load().num_promised_blocks == 6 + 6
    assert worker.machine.load().num_pulls_waiting == 1
    worker.post(DecodeCancelled("b"))
    assert worker.machine.load().num_promised_blocks == 6


@pytest.mark.parametrize("num_blocks", [8, 10])
def test_the_router_and_the_worker_agree_whether_a_hand_off_with_cached_blocks_has_room(num_blocks: int) -> None:
    """4 blocks are cached, and the prompt hits them and needs 3 others. A running sequence holds 2 and may need one
    more, so 1 or 3 are free."""
    worker = Decode(num_blocks)
    worker.arrive_alone(request("before", 16, max_tokens=1))
    worker.run_until_idle()
    worker.arrive_alone(request("runs", 7, max_tokens=8, first=200))
    worker.finish_step()
    load = replace(worker.machine.load(), num_released_blocks=0)
    record = WorkerRecord("D", ServiceRole.DECODE, worker.me, load, 0.0, "router", 8)
    question = RoutingQuestion(28, [(record.view, 0)], [(record.view, 16)], True, worker.me.layout.block_size)
    (found,) = SecondsPolicy(RouterConfig(local_prefill="never")).candidates(question)
    worker.arrive(request("again", 28, max_tokens=1))
    assert worker.is_wanted(1) == (not found.room_wait_s)


# ---- two half-pulled prompts


def test_a_pull_leaves_the_blocks_that_a_half_pulled_prompt_before_it_still_needs() -> None:
    worker = two_half_pulled()
    announce(worker, 2, 0, 5)
    assert targets_of(worker) == {"a": 2, "b": 2}, "a needs 4 of the other 7, and one to run"
    announce(worker, 1, 2, 6, token=20)
    assert targets_of(worker) == {"a": 6, "b": 2}
    announce(worker, 2, 5, 6, token=30)
    for _ in "ab":
        worker.finish_reads()
        worker.run_until_idle()
    assert worker.finished() == {"a", "b"}, "nobody waits for the end of a stall"


def test_a_pull_that_gets_its_last_blocks_passes_a_half_pulled_prompt() -> None:
    worker = two_half_pulled(num_blocks=8)
    worker.arrive(request("short", 16, max_tokens=2, first=300), ticket=3)
    announce(worker, 3, 0, 3)
    assert targets_of(worker) == {"a": 2, "b": 0, "short": 1}
    announce(worker, 3, 3, 4, token=40)
    assert targets_of(worker) == {"a": 2, "b": 0, "short": 4}
    announce(worker, 1, 2, 6, token=20)
    assert targets_of(worker) == {"a": 4, "b": 0, "short": 4}
    worker.run_steps_and_reads()
    assert worker.finished() == {"a", "short"}


def test_behind_a_pull_that_the_pool_cannot_serve_nobody_takes_a_block() -> None:
    worker = Decode(num_blocks=8)
    worker.arrive(request("a", 24, max_tokens=2), ticket=1)
    worker.arrive(request("b", 8, max_tokens=2, first=100), ticket=2)
    worker.arrive_alone(request("runs", 8, max_tokens=4, first=300))
    announce(worker, 1, 0, 6)
    assert targets_of(worker) == {"a": 5, "b": 0}, "one block is kept for the running sequence"
    worker.arrive_alone(request("later", 2, max_tokens=2, first=400))
    announce(worker, 2, 0, 2, token=30)
    assert targets_of(worker) == {"a": 5, "b": 0}
    assert [waiting.sequence_id for waiting in worker.core.scheduler.waiting] == ["later"]
    worker.run_until_idle()
    assert targets_of(worker) == {"a": 6, "b": 2}


def test_a_pull_that_ends_lets_the_next_one_take_its_blocks() -> None:
    worker = two_half_pulled()
    announce(worker, 2, 0, 5)
    worker.post(DecodeCancelled("a"))
    assert targets_of(worker) == {"a": 2, "b": 5}, "b needs what a will not need any more, and a still reads"
    worker.finish_reads()
    assert targets_of(worker) == {"b": 5}


# ---- when nothing runs, rank decides


def test_a_pull_of_higher_rank_takes_the_blocks_of_a_half_pulled_prompt_after_a_stall() -> None:
    worker = two_half_pulled(second_priority=-1)
    announce(worker, 1, 2, 5)
    announce(worker, 2, 0, 5)
    worker.finish_reads()
    assert targets_of(worker) == {"a": 5, "b": 4}
    worker.pass_time(0.9 * MAX_STALL_S)
    assert failures(worker) == []
    worker.pass_time(0.2 * MAX_STALL_S)
    assert failures(worker) == ["a"]
    assert isinstance(worker.only(DecodeFailed).error, TransferFailed)
    assert worker.only(DecodeFailed).error.retryable
    assert (worker.sent(Release)[-1].transfer_id, worker.sent(Release)[-1].reason) == (1, AbortReason.OVERLOADED)
    assert targets_of(worker) == {"b": 5}
    announce(worker, 2, 5, 6, token=30)
    worker.run_steps_and_reads()
    assert worker.finished() == {"b"}
    assert worker.ledger == {}


def test_a_pull_waits_for_half_pulled_prompts_of_higher_rank_without_a_limit() -> None:
    worker = two_half_pulled()
    announce(worker, 2, 0, 6, token=30)
    assert targets_of(worker) == {"a": 2, "b": 6}
    worker.run_steps_and_reads()
    worker.arrive(request("c", 32, max_tokens=2, first=300), ticket=3)
    worker.pass_time(3 * MAX_STALL_S)
    assert failures(worker) == []
    assert not worker.is_wanted(3)
    assert worker.machine.pulls.next_deadline() is None, "without a lower rank there is nothing to decide"


def test_a_running_sequence_takes_the_blocks_of_a_lower_rank_at_once() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive_alone(request("runs", 4, max_tokens=10))  # 4 blocks at its end
    worker.arrive(request("low", 8, first=100, priority=1), ticket=1)
    announce(worker, 1, 0, 1)
    worker.finish_reads()
    while worker.plans:
        worker.finish_step()
    assert failures(worker) == ["low"]
    assert worker.now == 50.0
    assert worker.finished() == {"runs"}
    assert worker.ledger == {}


def test_blocks_that_a_read_still_writes_to_are_waited_for() -> None:
    worker = Decode(num_blocks=4)
    worker.arrive_alone(request("runs", 4, max_tokens=10))
    worker.arrive(request("low", 8, first=100, priority=1), ticket=1)
    worker.arrive(request("lower", 4, first=200, priority=2), ticket=2)
    announce(worker, 1, 0, 1)
    (read,) = worker.of(StartRead)
    while worker.plans:
        worker.finish_step()
    assert failures(worker) == ["low"], "one victim at a time"
    assert worker.ledger == {"held": 3, "incoming": 1}
    worker.post(ReadFailed(read.read_id, AbortReason.READ_FAILED, "taken back"))
    worker.run_until_idle()
    assert worker.finished() == {"runs"}


@pytest.mark.parametrize("num_events", [1, 20])
def test_events_that_move_nothing_do_not_prolong_a_stall(num_events: int) -> None:
    worker = two_half_pulled(second_priority=-1)
    announce(worker, 1, 2, 5)
    announce(worker, 2, 0, 5)
    worker.finish_reads()
    for number in range(num_events):
        worker.pass_time(MAX_STALL_S / num_events)
        if number < 8:
            worker.arrive_alone(request(f"later{number}", 4, first=1000 + 10 * number, priority=5))
    worker.pass_time(0.05)
    assert failures(worker) == ["a"]


# ---- beside local prompts


def test_a_hand_off_that_fits_beside_older_local_prompts_does_not_wait_for_them() -> None:
    """The prompts of 40 tokens wait for steps, not for blocks."""
    worker = Decode(num_blocks=64)
    for number in range(3):
        worker.arrive_alone(request(f"local{number}", 40, first=100 * number + 1))
    worker.arrive(request("pulled", 24, first=1000), ticket=1)
    assert worker.is_wanted(1)
    worker.arrive_alone(request("younger", 8, first=2000))
    worker.pull()
    worker.run_steps_and_reads()
    assert worker.finished() == {"local0", "local1", "local2", "pulled", "younger"}


def test_a_hand_off_that_does_not_fit_beside_older_local_prompts_waits_for_their_blocks() -> None:
    worker = Decode(num_blocks=16)
    worker.arrive_alone(request("local0", 40, first=1))
    worker.arrive_alone(request("local1", 20, first=100))
    worker.arrive(request("pulled", 24, first=1000), ticket=1)
    assert not worker.is_wanted(1)
    while not worker.is_wanted(1):
        worker.finish_step()
    worker.pull()
    worker.run_steps_and_reads()
    assert worker.finished() == {"local0", "local1", "pulled"}


# ---- what a hand-off waits for, and what an end leaves behind


def with_a_cached_prompt(num_blocks: int = 16) -> Decode:
    """A worker with two blocks of a prompt in its prefix cache."""
    worker = Decode(num_blocks)
    worker.arrive_alone(request("before", 9, max_tokens=1))
    worker.run_until_idle()
    assert worker.ledger == {}
    return worker


def test_a_hand_off_does_not_wait_for_a_later_prompt() -> None:
    worker = Decode(num_blocks=6, scheduler=SchedulerConfig(max_batched_tokens=8, max_running=1))
    worker.arrive_alone(request("runs", 16, max_tokens=1))
    worker.arrive(request("a", 14, first=30))
    worker.arrive_alone(request("later", 8, first=50))
    while worker.chunks()[0][0] == "runs":
        assert not worker.sent(Want), "the hand-off has blocks too early"
        worker.finish_step()
    assert worker.wanted() == (0, 1, 2, 3)
    assert worker.chunks() == [("later", 0, 8)]


def test_a_hand_off_that_waits_for_blocks_holds_no_cached_blocks() -> None:
    worker = with_a_cached_prompt(num_blocks=6)
    worker.arrive_alone(request("runs", 12, first=40, max_tokens=2))
    assert worker.ledger == {"held": 2}
    worker.arrive(request("a", 14))
    assert worker.ledger == {"held": 2}
    assert worker.machine.load().num_pulls_waiting == 1
    worker.run_until_idle()
    assert worker.wanted() == (2, 3), "the cached blocks are still in the cache"


def test_a_hand_off_without_a_first_token_fails_and_releases_its_blocks() -> None:
    worker = with_a_cached_prompt()
    worker.arrive(request("a", 14))
    worker.ready(*worker.wanted(), last=True)
    worker.finish_reads()
    failed = worker.only(DecodeFailed)
    assert isinstance(failed.error, TransferFailed)
    assert "delivered no first token" in str(failed.error)
    assert worker.ledger == {}


def test_a_worker_is_idle_only_when_its_calls_pulls_and_reads_have_ended() -> None:
    worker = Decode()
    assert worker.machine.idle
    worker.arrive_alone(request("local", 4, max_tokens=2))
    assert not worker.machine.idle
    worker.run_until_idle()
    assert worker.machine.idle
    worker.arrive(request("pulled", 4, max_tokens=2))
    assert not worker.machine.idle
    worker.pull()
    assert not worker.machine.idle
    worker.run_until_idle()
    assert worker.machine.idle


def test_an_ended_call_leaves_no_deadline_and_its_id_may_be_used_again() -> None:
    worker = Decode()
    for _ in range(2):
        worker.arrive_alone(request("a", 4, max_tokens=2))
        worker.run_until_idle()
        assert worker.machine.next_deadline() is None
    assert [done.request_id for done in worker.of(DecodeDone)] == ["a", "a"]


def test_a_waiting_hand_off_looks_for_blocks_again_only_after_a_change_of_the_pool() -> None:
    worker = Decode(num_blocks=5)
    worker.arrive(request("running", 12, max_tokens=6))
    worker.pull()
    worker.arrive(request("waits", 8, first=40, max_tokens=2), ticket=2)
    assert not worker.is_wanted(2)
    num_changes = worker.pool.num_changes
    for _ in range(3):
        worker.post(Tick())
    assert worker.pool.num_changes == num_changes, "each event holds and drops the cached prefix"
    worker.run_until_idle()
    assert worker.is_wanted(2)
