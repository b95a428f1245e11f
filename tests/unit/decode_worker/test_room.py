"""A decode worker that will run short of blocks offers the sequences that preemption would take."""

from __future__ import annotations

import pytest

from core.handoff import Want
from core.lifecycle import MoveReason, Stage
from decode_worker import room
from decode_worker.events import AskToMove, HandedOver, MoveArrived
from decode_worker.moves import ASK_AGAIN_S
from tests.support.driven_worker import BLOCK_SIZE, LAYOUT, request
from tests.unit.decode_worker.driven_decode import Decode

TICKET = 7
PROMPT, OUTPUT = 2 * BLOCK_SIZE, 10 * BLOCK_SIZE


@pytest.fixture(autouse=True)
def moves_of_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a driven worker take no time."""
    monkeypatch.setattr(room, "_num_steps_of_move", lambda *_: 8)


class Crowded(Decode):
    """Sequences r0, r1, ... that run, in the order of their ranks."""

    def __init__(self, num_sequences: int, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        for number in range(num_sequences):
            self.arrive_alone(request(f"r{number}", PROMPT, max_tokens=OUTPUT, first=100 * number + 1))
        while len(self.machine.core.scheduler.running) < num_sequences or self.machine.core.scheduler.queues.prefilling:
            self.finish_step()

    def run_until_asked(self) -> AskToMove:
        while not self.of(AskToMove):
            assert self.plans, "it has ended"
            self.finish_step()
        return self.of(AskToMove)[0]


def test_a_worker_with_blocks_for_all_to_their_ends_asks_for_no_move() -> None:
    worker = Crowded(3, num_blocks=3 * 12 + 3)
    while worker.plans:
        worker.finish_step()
    assert len(worker.finished()) == 3
    assert not worker.of(AskToMove)


def test_a_worker_that_will_run_short_offers_the_lowest_rank_before_it_preempts() -> None:
    worker = Crowded(3, num_blocks=18)
    asked = worker.run_until_asked()
    assert asked.reason is MoveReason.ROOM
    assert asked.request_ids[0] == "r2"
    assert "r0" not in asked.request_ids, "the highest rank is never preempted"
    assert worker.machine.core.scheduler.num_preemptions == 0


def test_a_sequence_alone_is_not_offered() -> None:
    worker = Crowded(1, num_blocks=12)
    while worker.plans:
        worker.finish_step()
    assert worker.finished() == {"r0"}
    assert not worker.of(AskToMove)


def test_the_worker_offers_others_if_no_router_answers() -> None:
    worker = Crowded(3, num_blocks=18)
    first = worker.run_until_asked()
    worker.pass_time(ASK_AGAIN_S)
    worker.finish_step()
    asked = [name for action in worker.of(AskToMove) for name in action.request_ids]
    assert len(asked) > len(first.request_ids)
    assert set(asked) <= {"r1", "r2"}


def test_an_old_request_ranks_above_those_that_came_to_this_worker_before() -> None:
    worker = Decode(num_blocks=64)
    worker.now = 100.0
    for name, age_s in (("new", 0.0), ("moved", 50.0)):
        worker.arrive_alone(request(name, PROMPT, max_tokens=OUTPUT).derive(age_s=age_s))
    worker.finish_step()
    ranked = [*worker.machine.core.scheduler.running, *worker.machine.core.scheduler.waiting]
    assert sorted(sequence.sequence_id for sequence in ranked) == ["moved", "new"]
    assert min(ranked, key=lambda sequence: sequence.rank).sequence_id == "moved"


@pytest.mark.parametrize("has_room", [True, False])
def test_the_sequences_that_move_pause_before_another_one_is_preempted(has_room: bool) -> None:
    """A reader without room takes nothing: then the worker preempts, as it would without moves."""
    worker = Crowded(3, num_blocks=18)
    worker.run_until_asked()
    worker.post(MoveArrived("r2", TICKET, worker.peer, PROMPT + 1))
    if has_room:
        worker.hear(lambda i, c: Want(TICKET, i, c, LAYOUT.fingerprint(), tuple(range(12))))
    for _ in range(4 * BLOCK_SIZE):
        if worker.machine.core.pool.num_available < 1 or worker.of(HandedOver):
            break
        worker.finish_step()
    timeline = worker.machine.core.open_calls.timelines["r2"]
    assert (timeline.stage is Stage.MOVE) == has_room
    assert bool(worker.of(HandedOver)) == has_room
