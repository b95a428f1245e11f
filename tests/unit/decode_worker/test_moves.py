"""A running sequence leaves a decode worker, and arrives at one. The peer of the worker is the other side."""

from __future__ import annotations

import pytest

from core.errors import TransferFailed, WorkerDrains
from core.handoff import Abort, AbortReason, Heartbeat, HeartbeatEntry, OfferedBlocks, Ready, Release, Want
from core.lifecycle import FinishReason, Stage
from decode_worker.events import (
    AskToMove,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeFailed,
    HandedOver,
    MoveArrived,
    ResumeArrived,
)
from decode_worker.moves import ASK_AGAIN_S, MAX_MOVES, ROOM_WAIT_S
from kv_transfer.protocol.events import PeerLost
from tests.support.driven_worker import BLOCK_SIZE, LAYOUT, LEASE_S, address, request
from tests.unit.decode_worker.driven_decode import Decode
from worker.core import DrainRequested

TICKET = 7


class Source(Decode):
    """A worker whose sequence "a" has a prompt of 10 tokens, runs, and moves to the peer."""

    def __init__(
        self, num_steps: int = 3, plans_ahead: bool = False, max_tokens: int = 40, num_blocks: int = 32
    ) -> None:
        super().__init__(num_blocks=num_blocks, plans_ahead=plans_ahead)
        self.arrive_alone(request("a", 10, max_tokens=max_tokens))
        for _ in range(num_steps + 1):  # the prompt takes two steps
            self.finish_step()

    @property
    def num_tokens(self) -> int:
        sequence = self.core.scheduler.get("a")
        assert sequence is not None
        return sequence.num_tokens

    def move(self, num_known: int = 11) -> list[object]:
        return self.post(MoveArrived("a", TICKET, self.peer, num_known))

    def want(self, *positions: int) -> list[object]:
        return self.hear(lambda i, c: Want(TICKET, i, c, LAYOUT.fingerprint(), positions))

    def verified(self, num_ready: int) -> list[object]:
        entry = (HeartbeatEntry(TICKET, num_ready, 0, num_ready),)
        return self.hear(lambda i, c: Heartbeat(i, c, None, entry))

    def release(self, reason: AbortReason | None = None) -> list[object]:
        return self.hear(lambda i, c: Release(TICKET, i, c, reason))

    def announced(self) -> list[int]:
        return [position for ready in self.sent(Ready) for position in ready.blocks.positions]

    def hand_over(self) -> None:
        """Up to the last READY."""
        self.move()
        self.want(*range(8))
        self.verified(len(self.announced()))
        while self.plans:
            self.finish_step()

    def runs_on(self) -> bool:
        return bool(self.plans) and [name for name, _, _ in self.chunks()] == ["a"]


def test_full_blocks_are_offered_at_once_and_each_new_one_when_it_is_full() -> None:
    source = Source()
    assert source.num_tokens == 13
    source.move()
    source.want(*range(8))
    assert source.announced() == [0, 1, 2], "12 tokens are computed"
    for _ in range(BLOCK_SIZE):
        source.finish_step()
    assert source.announced() == [0, 1, 2, 3]
    assert source.runs_on(), "the copy holds nothing up"
    assert not any(ready.last for ready in source.sent(Ready))


def test_a_sequence_whose_reader_has_caught_up_pauses_and_goes_with_its_last_block_and_all_tokens() -> None:
    source = Source()
    source.move(num_known=11)
    source.want(*range(8))
    source.verified(3)
    assert not source.of(HandedOver), "a step is in flight"
    source.finish_step()
    assert not source.plans, "no step plans it any more"
    last = source.sent(Ready)[-1]
    assert last.last
    assert last.blocks.positions == (3,)
    assert last.token_ids == (11, 12, 13), "all tokens after the 11 that the reader knows"
    assert source.only(HandedOver) == HandedOver("a", 4)
    source.release()
    done = source.only(DecodeDone)
    assert done.finish_reason is FinishReason.HANDOFF
    assert done.moved_bytes == 4 * LAYOUT.block_bytes
    assert [stage for stage, _, _ in done.timeline.history][-1] is Stage.MOVE
    assert source.ledger == {}
    assert source.machine.idle


def test_a_step_that_is_planned_ahead_ends_before_the_sequence_goes() -> None:
    source = Source(plans_ahead=True)
    while len(source.plans) < 2:
        source.pass_time(0.001)
    source.move()
    source.want(*range(8))
    source.verified(3)
    source.finish_step()
    assert not source.of(HandedOver), "another step contains it"
    num_tokens = source.num_tokens
    source.finish_step()
    assert source.num_tokens == num_tokens + 1
    assert source.only(HandedOver).first_index == source.num_tokens - 10


def test_a_reader_that_has_not_verified_all_announced_blocks_pauses_nothing() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.verified(2)
    source.finish_step()
    assert source.runs_on()


def test_a_sequence_pauses_where_the_wanted_blocks_end() -> None:
    source = Source()
    source.move()
    source.want(*range(4))
    while source.plans:
        source.finish_step()
    assert source.num_tokens == 4 * BLOCK_SIZE + 1
    assert source.only(HandedOver).first_index == 7


def test_a_sequence_that_has_outgrown_the_wanted_blocks_stays() -> None:
    source = Source(num_steps=8)
    source.move()
    source.want(*range(3))
    source.finish_step()
    assert source.only(Abort).reason is AbortReason.OVERLOADED
    assert source.runs_on()
    source.release(AbortReason.OVERLOADED)
    assert source.runs_on()


def test_a_reader_without_room_in_time_loses_the_move() -> None:
    source = Source()
    source.move()
    source.pass_time(ROOM_WAIT_S - 0.1)
    assert not source.sent(Abort)
    source.pass_time(0.2)
    assert source.only(Abort).reason is AbortReason.OVERLOADED
    assert source.runs_on()


@pytest.mark.parametrize("reason", [AbortReason.READ_FAILED, AbortReason.CANCELLED])
def test_a_release_with_a_reason_lets_the_sequence_run_on_in_its_blocks(reason: AbortReason) -> None:
    source = Source()
    source.hand_over()
    num_tokens = source.num_tokens
    source.release(reason)
    assert source.chunks() == [("a", num_tokens - 1, 1)]
    source.run_until_idle()
    done = source.only(DecodeDone)
    assert source.emitted("a") == list(range(10, 50))
    assert done.num_recomputed_tokens == 0


def test_after_resume_the_sequence_leaves_the_block_that_the_reader_may_still_read() -> None:
    source = Source()
    source.hand_over()
    num_tokens = source.num_tokens
    assert (num_tokens - 1) % BLOCK_SIZE, "the last block is partly filled"
    source.post(ResumeArrived("a", TICKET))
    first = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert source.chunks() == [("a", first, num_tokens - first)]
    assert source.only(Abort).reason is AbortReason.CANCELLED
    source.run_until_idle()
    assert source.emitted("a") == list(range(10, 50))
    assert source.only(DecodeDone).num_recomputed_tokens == num_tokens - 1 - first
    assert source.ledger == {"leased": 4}, "until the reader releases them"
    source.pass_time(LEASE_S)
    assert source.ledger == {}


def test_resume_while_blocks_are_copied_ends_the_move_alone() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.post(ResumeArrived("a", TICKET))
    source.finish_step()
    assert source.runs_on()
    source.post(ResumeArrived("a", TICKET))  # again, and for no move
    assert source.runs_on()


def test_a_paused_sequence_without_a_sign_of_its_reader_ends_within_a_lease() -> None:
    source = Source()
    source.hand_over()
    source.pass_time(LEASE_S - 0.1)
    assert not source.of(DecodeFailed)
    source.pass_time(0.2)
    assert isinstance(source.only(DecodeFailed).error, TransferFailed)
    assert source.ledger == {}


def test_a_reader_that_keeps_its_lease_alive_has_no_longer() -> None:
    source = Source()
    source.hand_over()
    for _ in range(5):
        source.pass_time(LEASE_S / 5 - 0.01)
        source.verified(len(source.announced()))
    source.pass_time(0.1)
    assert isinstance(source.only(DecodeFailed).error, TransferFailed)
    assert source.ledger == {"leased": 4}


def test_a_lost_reader_resumes_nothing_that_was_handed_over() -> None:
    source = Source()
    source.hand_over()
    source.post(PeerLost(source.peer.name, "gone"))
    assert not source.plans, "it may have sampled before it went"
    source.post(ResumeArrived("a", TICKET))
    assert source.runs_on()


def test_a_lost_reader_ends_the_copy_alone() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.post(PeerLost(source.peer.name, "gone"))
    source.finish_step()
    assert source.runs_on()
    source.run_until_idle()
    assert source.emitted("a") == list(range(10, 50))


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_cancelled_call_leaves_only_what_the_reader_may_read(is_handed_over: bool) -> None:
    source = Source()
    if is_handed_over:
        source.hand_over()
    else:
        source.move()
        source.want(*range(8))
    source.post(DecodeCancelled("a"))
    assert len(source.sent(Abort)) == (0 if is_handed_over else 1), "the reader has everything, or nothing"
    while source.plans:
        source.finish_step()
    assert source.ledger == {"leased": 4 if is_handed_over else 3}
    source.release(None if is_handed_over else AbortReason.CANCELLED)
    assert source.ledger == {}
    assert source.machine.idle


def test_a_sequence_that_ends_during_the_copy_takes_the_move_with_it() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.finish_step(a=63)
    assert source.only(DecodeDone).finish_reason is FinishReason.STOP
    assert source.only(Abort).reason is AbortReason.CANCELLED


def test_a_sequence_that_ends_in_the_step_before_its_pause_is_not_handed_over() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.verified(3)
    source.finish_step(a=63)
    assert source.only(DecodeDone).finish_reason is FinishReason.STOP
    assert not source.of(HandedOver)


def test_a_failed_step_ends_a_sequence_that_pauses() -> None:
    source = Source()
    source.move()
    source.want(*range(8))
    source.verified(3)
    source.fail_step()
    assert source.only(DecodeFailed)
    assert source.only(Abort)


def test_a_moving_sequence_is_not_preempted() -> None:
    source = Source(num_blocks=6, max_tokens=10)
    source.move()
    source.want(*range(5))
    source.arrive_alone(request("b", 8, max_tokens=4, priority=-1, first=40))
    while source.plans:
        source.finish_step()
    assert source.core.scheduler.num_preemptions == 0, "its leased blocks would not become free"
    assert source.finished() == {"a"}
    source.release(AbortReason.CANCELLED)
    source.run_until_idle()
    assert source.finished() == {"a", "b"}
    assert source.emitted("b") == [8, 9, 10, 11]


@pytest.mark.parametrize("request_id", ["a", "unknown"])
def test_a_sequence_that_cannot_move_is_refused(request_id: str) -> None:
    source = Source()
    source.move()
    with pytest.raises(TransferFailed):
        source.post(MoveArrived(request_id, TICKET + 1, address("other"), 11))


# ---- drain


def test_a_worker_that_drains_returns_what_it_has_not_begun_and_asks_for_the_rest() -> None:
    source = Source()
    source.arrive_alone(request("long", 30, max_tokens=4, first=100))
    source.arrive_alone(request("waits", 8, max_tokens=4, first=200))
    source.arrive(request("pulled", 8, max_tokens=4, first=300), ticket=3)
    source.post(DrainRequested())
    returned = {failed.request_id: failed.error for failed in source.of(DecodeFailed)}
    assert "waits" in returned
    assert all(isinstance(error, WorkerDrains) for error in returned.values())
    assert "pulled" not in returned, "its prompt is being computed elsewhere"
    assert source.only(AskToMove).request_ids == ("a",)
    with pytest.raises(WorkerDrains):
        source.arrive_alone(request("late", 8))


def test_a_worker_asks_again_when_no_router_answers_and_for_few_at_a_time() -> None:
    worker = Decode(num_blocks=64)
    for number in range(4):
        worker.arrive_alone(request(f"r{number}", 1, max_tokens=40, first=10 * number + 1))
    for _ in range(4):
        worker.finish_step()
    worker.post(DrainRequested())
    assert len(worker.only(AskToMove).request_ids) == min(MAX_MOVES, 4)
    worker.pass_time(ASK_AGAIN_S - 0.1)
    assert len(worker.of(AskToMove)) == 1
    worker.pass_time(0.2)
    assert len(worker.of(AskToMove)) == 2


# ---- the target


def arrive(target: Decode, num_known: int, max_tokens: int = 40) -> None:
    known = tuple(range(1, num_known + 1))
    moving = request("a", 10, max_tokens=max_tokens, resumed=known[10:])
    target.post(DecodeArrived(moving, (1, target.peer), target.now + 60.0, is_move=True))


def test_the_target_wants_blocks_to_come_tells_what_it_has_and_takes_fewer() -> None:
    target = Decode(num_blocks=32)
    arrive(target, 12)
    assert target.wanted() == tuple(range(-(-49 // BLOCK_SIZE))), "up to the end: it is near"
    target.ready(0, 1, 2)
    target.finish_reads()
    (entry,) = target.sent(Heartbeat)[-1].entries
    assert entry.num_verified == 3, "at once"
    target.hear(lambda i, c: Ready(1, i, c, target.sent(Want)[-1].counter, 3, _blocks(3), True, (12, 13, 14)))
    target.finish_reads()
    assert target.only(Release).reason is None
    assert target.emitted("a") == [12, 13, 14], "what it was given"
    assert target.only(HandedOver) == HandedOver("a", 5)
    assert target.chunks() == [("a", 14, 1)]
    target.run_until_idle()
    assert target.ledger == {}


def test_a_target_that_knows_all_tokens_computes_the_newest_one() -> None:
    target = Decode(num_blocks=32)
    arrive(target, 12)
    target.ready(0, 1, 2, last=True)
    target.finish_reads()
    assert target.chunks() == [("a", 11, 1)]
    assert target.only(HandedOver) == HandedOver("a", 2)


def test_a_target_with_too_few_blocks_for_the_tokens_refuses_them() -> None:
    target = Decode(num_blocks=32)
    arrive(target, 12, max_tokens=8)
    positions = target.wanted()
    target.ready(*positions)
    target.finish_reads()
    tokens = tuple(range(30))
    target.hear(lambda i, c: Ready(1, i, c, target.sent(Want)[-1].counter, len(positions), _blocks(), True, tokens))
    assert target.only(Release).reason is AbortReason.READ_FAILED
    assert isinstance(target.only(DecodeFailed).error, TransferFailed)
    assert target.ledger == {}


def _blocks(*positions: int) -> OfferedBlocks:
    return OfferedBlocks.of((position, position, 0) for position in positions)
