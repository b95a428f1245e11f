"""A decode worker that will run short of blocks offers the sequences that preemption would take."""

import pytest

from core.cost.step_cost import StepWork
from decode_worker import room
from tests.support.driven_worker import LAYOUT
from tests.support.worker_words import WorkerReplay, transcripts

num_steps_of_move = room._num_steps_of_move


@pytest.fixture(autouse=True)
def moves_of_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a driven worker take no time."""
    monkeypatch.setattr(room, "_num_steps_of_move", lambda *_: 8)


CROWDED = """
  decode blocks=18
  arrive r0 8 max=40          -> first step r0 0+8
  arrive r1 8 max=40 first=101
  arrive r2 8 max=40 first=201
"""

test_room = transcripts(
    """
a worker with blocks for all to their ends asks for no move
  decode blocks=36
  arrive r0 8 max=40          -> first step r0 0+8
  arrive r1 8 max=40 first=101
  arrive r2 8 max=40 first=201
  run                         -> tokens r0 0: 8..47; tokens r1 0: 8..47; tokens r2 0: 8..47; done r0 length
                              -> done r1 length; done r2 length

a worker that will run short offers the lowest rank before it preempts, and others if no router answers
  run 10                      -> tokens r0 0: 8..17; tokens r1 0: 8..15; tokens r2 0: 8..14; ask to move r2 (room)
                              -> step r0 17+1, r1 15+1, r2 14+1
  load                        -> serving
  wait 0.5
  step                        -> step r0 18+1, r1 16+1, r2 15+1; tokens r0 10: 18, r1 8: 16, r2 7: 15
                              -> ask to move r2 (room)

an old request ranks above those that came to this worker before
  decode blocks=12
  arrive new 8 max=40         -> first step new 0+8
  arrive moved 8 max=40 first=101 age_s=50
  run 12                      -> tokens new 0: 8..19; tokens moved 0: 8..17; ask to move new (room)
                              -> step moved 17+1, new 19+1

the sequences that move pause before another one is preempted
  run 12                      -> tokens r0 0: 8..19; tokens r1 0: 8..17; tokens r2 0: 8..16; ask to move r2 (room)
                              -> step r0 19+1, r1 17+1, r2 16+1
  move r2 7 9                 -> connect peer; digests 4
  want 7 0..11                -> ready 7: 0..3
  wait 0.6
  run 3                       -> tokens r0 12: 20..22; tokens r1 10: 18..20; tokens r2 9: 17 18; digests 1
                              -> ready 7: 4 last 9..18; handed over r2 11; step r0 22+1, r1 20+1
  load                        -> serving

a reader without room takes nothing, and the worker preempts
  run 12                      -> tokens r0 0: 8..19; tokens r1 0: 8..17; tokens r2 0: 8..16; ask to move r2 (room)
                              -> step r0 19+1, r1 17+1, r2 16+1
  move r2 7 9                 -> connect peer; digests 4
  run 10                      -> tokens r0 12: 20..29; tokens r1 10: 18..22; tokens r2 9: 17..26
                              -> ask to move r1 (room); digests 1; digests 1; step r0 29+1, r2 26+1
  load                        -> serving; waiting 1; promised 6; preemptions 1
""",
    CROWDED,
)


def test_a_move_takes_half_a_second_and_the_time_of_its_bytes() -> None:
    worker = WorkerReplay("decode", "arrive a 8 max=40", "step")
    transfers, (sequence,) = worker.machine.transfers, worker.core.scheduler.running
    num_bytes, step = len(sequence.block_table) * LAYOUT.block_bytes, StepWork(1, 8, 0, 0.0)
    transfers.counters.num_bytes_read, transfers.counters.read_seconds = num_bytes, 3.0
    expected = int(3.5 / max(worker.core.costs.cost.seconds(step), room.MIN_STEP_S)) + 1
    assert num_steps_of_move(worker.core, transfers, sequence, step) == expected
