"""Hand-offs that wait for blocks, and ends that leave no block, no deadline and no request id."""

from __future__ import annotations

from core.config import SchedulerConfig
from core.errors import TransferFailed
from core.handoff import Want
from core.machine import Tick
from decode_worker.machine import DecodeDone, DecodeFailed
from tests.support.driven_worker import request
from tests.unit.decode_worker.driven_decode import Decode


def with_a_cached_prompt(num_blocks: int = 16) -> Decode:
    """A worker with two blocks of a prompt in its prefix cache."""
    worker = Decode(num_blocks)
    worker.arrive_alone(request("before", 9, max_tokens=1))
    worker.run_until_idle()
    assert worker.ledger == {}
    return worker


# ---- the order of hand-offs and prompts


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


# ---- ends


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
