"""When a worker plans the next step, and what becomes of that step when the step in flight turns out otherwise.

A step takes 0.1 s, and its successor is planned 0.01 s before its expected end.
"""

from __future__ import annotations

import pytest

from core.cost.step_cost import StepWork
from tests.support.worker_words import WorkerReplay, transcripts
from worker.core import StepTimes

# At the start of a decode step of known duration: two tokens are out, and the step samples the third.
DECODING = """
  decode ahead=1
  arrive a 6 max=12           -> first step a 0+6
  later 0.1
  step                        -> step a 6+1; tokens a 0: 6
  later 0.1
  step                        -> step a 7+1; tokens a 1: 7
"""

# As before, but the token after the third one is the last.
ENDING = """
  decode ahead=1
  arrive a 6 max=3            -> first step a 0+6
  later 0.1
  step                        -> step a 6+1; tokens a 0: 6
  later 0.1
  step                        -> step a 7+1; tokens a 1: 7
"""

test_when = transcripts(
    """
a tick plans the next step shortly before the expected end of the step in flight
  deadline                    -> in 0.09
  wait 0.089999
  wait 0.000002               -> step ahead a 8+1

a timer that is a little early is no reason for another timer
  later 0.0895
  tick                        -> step ahead a 8+1

a sequence that arrives before that time is in the next step and a later one is not
  wait 0.08
  arrive early 3 first=20
  wait 0.010001               -> step ahead a 8+1, early 0+3
  arrive late 3 first=30

a short step gets its successor at once
  decode ahead=1
  arrive a 6 max=8            -> first step a 0+6
  later 0.005
  step                        -> step a 6+1; tokens a 0: 6
  later 0.005
  step                        -> step a 7+1; step ahead a 8+1; tokens a 1: 7
  later 0.005
  step                        -> step ahead a 9+1; tokens a 2: 8
""",
    DECODING,
)

test_the_last_step = transcripts(
    """
the first step after a time without work is marked
  wait 0.1
  step                        -> tokens a 2: 8; done a length, block seconds 0.6, prefill 0.1, decode 0.2
  later 1
  arrive b 3 first=20         -> first step b 0+3

a step that cannot be planned ahead sets no timer in the past, but the next event tries again
  wait 0.090001  # the promised token is the last
  deadline                    -> in 59.71
  arrive b 3 first=20         -> step ahead b 0+3
""",
    ENDING,
)

test_the_step_ahead = transcripts(
    """
a failed step ends its calls and a call of the step ahead goes on
  wait 0.05
  arrive b 3 first=20 max=3
  wait 0.040001               -> step ahead a 8+1, b 0+3
  fail_step                   -> step b 0+3; fail a TandemError: the step failed
  run                         -> tokens b 0: 3..5; done b length, block seconds 1e-06, queue 0.04, prefill 1e-06
  blocks

a sequence without memory ends while the step ahead contains it and others emit both tokens
  wait 0.05
  arrive b 3 first=20 max=6
  wait 0.05                   -> step ahead a 8+1, b 0+3
  step                        -> tokens a 2: 8
  wait 0.05
  step                        -> step a 9+1, b 3+1; tokens a 3: 9, b 0: 3
  wait 0.05
  step                        -> step a 10+1, b 4+1; tokens a 4: 10, b 1: 4
  wait 0.1                    -> step ahead a 11+1, b 5+1
  step no_memory=a            -> fail a OutOfDeviceMemory: no memory for a; tokens b 2: 5
  step no_memory=a            -> step b 6+1; tokens b 3: 6
  run                         -> tokens b 4: 7 8
                              -> done b length, block seconds 0.31, queue 0.04, prefill 0.06, decode 0.15
  blocks
  idle                        -> yes

a prompt is offered chunk by chunk over two steps in flight
  prefill ahead=1
  arrive first 18 first=100   -> first step first 0+8; connect peer
  want 1 0..4                 -> ready 1:
  step                        -> step first 8+8; step ahead first 16+2; digests 2; ready 1: 0 1
  wait 0.005
  step                        -> digests 2; ready 1: 2 3
  wait 0.005
  step                        -> digests 1; ready 1: 4 last 18; done first 0: 18, block seconds 0.05, prefill 0.01
  wait 0.005
  arrive a 18 first=200 ticket=2 -> first step a 0+8; step ahead a 8+8
  want 2 0..4                 -> ready 2:
  step                        -> step ahead a 16+2; digests 2; ready 2: 0 1
  wait 0.005
  step                        -> digests 2; ready 2: 2 3
  wait 0.005
  step                        -> digests 1; ready 2: 4 last 18; done a 0: 18, block seconds 0.05, prefill 0.01
""",
    DECODING,
)


def test_the_expected_duration_falls_at_once_and_rises_by_a_quarter() -> None:
    times = StepTimes()
    assert times.expected_s(100) is None
    for duration_s, expected_s in [(1.0, 1.0), (0.2, 0.2), (0.6, 0.3)]:
        times.record(100, duration_s)
        assert times.expected_s(100) == pytest.approx(expected_s)
    assert times.expected_s(101) == pytest.approx(0.3), "a similar size"
    assert times.expected_s(128) is None


def test_a_step_with_a_failed_sequence_teaches_no_duration() -> None:
    """The runner computes such a step again in parts, so its duration says nothing about the next one."""
    worker = WorkerReplay()
    worker.play(DECODING)
    worker.arrive("b", 3, first=20, max=3)
    worker.step()
    before = worker.core.costs.cost
    worker.later(100)
    worker.step(no_memory="b")
    assert worker.core.costs.cost is before
    worker.later(100)
    worker.step()
    assert worker.core.costs.cost is not before


def test_the_time_of_the_engine_counts_and_not_that_of_a_loop_that_stood_still() -> None:
    worker = WorkerReplay()
    worker.play(DECODING)
    before = worker.core.costs.cost.seconds(decode := StepWork(1, 8, 0, 0.0))
    worker.later(100)
    worker.step(seconds=before)
    assert worker.core.costs.cost.seconds(decode) == pytest.approx(before, rel=0.1)
