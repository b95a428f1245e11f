"""With `admission = "shed"`, a request whose first token is predicted too late is refused at once."""

from __future__ import annotations

from dataclasses import replace

from router.requests.admission import QueueWait, refusal
from tests.unit.router.driving_router import CONFIG
from tests.unit.router.transcript import transcripts

# A prompt of 8 tokens takes 0.41 s on workers that have measured their steps (`token_s`).
SHEDDING = """
  config admission=shed slo_ttft_ms=1000.0 max_queued=20
"""

test_a_request_that_would_be_late = transcripts(
    """
it is refused with the lateness as hint
  # 0.9 s of prompts and 0.41 s of its own, where 1 s is wanted.
  fleet D
  reports D token_s=0.05 backlog=0.9
  arrives r -> fail r QueueFull: the first token is predicted 1.312 s after the arrival of the request, and \
               slo_ttft_ms is 1000, retry after 0.312 s
  counts    -> queued 0; in flight 0; deadlines 0

it is refused by its deadline
  fleet D
  reports D token_s=0.05
  arrives r timeout_s=0.3 -> fail r QueueFull: the first token is predicted 0.412 s after the arrival of the \
                             request, and its deadline is 0.300 s, retry after 0.112 s

the hint is at least a tenth of a second
  fleet D
  reports D token_s=0.05 backlog=0.6
  arrives r -> fail r QueueFull: the first token is predicted 1.012 s after the arrival of the request, and \
               slo_ttft_ms is 1000, retry after 0.1 s

queue admits what would be late
  config admission=queue
  fleet D
  reports D token_s=0.05 backlog=30.0
  arrives r -> decode r#1 D

no request is refused by a guess
  # A worker that has measured no step would otherwise never measure one.
  fleet D
  reports D backlog=30.0
  arrives r -> decode r#1 D

time in the queue of the router counts
  arrives r
  time 0.8
  arrives later
  enter D token_s=0.05 -> fail r QueueFull: the first token is predicted 1.212 s after the arrival of the request, \
                          and slo_ttft_ms is 1000, retry after 0.212 s
                       -> decode later#1 D

a request that has streamed tokens is never refused
  fleet D1 D2
  arrives r            -> decode r#1 D1
  tokens_from r#1 0 11 -> deliver r 0: 11
  reports D1 token_s=0.05 backlog=30.0
  reports D2 token_s=0.05 backlog=30.0
  decode_error r#1 WorkerUnavailable connection reset -> decode r#2 D2 behind 11

choices that follow the first one are not refused
  fleet D
  reports D token_s=0.05
  arrives a others=b   -> decode a#1 D
  reports D token_s=0.05 backlog=30.0
  tokens_from a#1 0 11 -> deliver a 0: 11; decode b#1 D

a call is refused with all its choices
  fleet D
  reports D token_s=0.05 backlog=30.0
  arrives a others=b -> fail a QueueFull: the first token is predicted 30.422 s after the arrival of the request, \
                        and slo_ttft_ms is 1000, retry after 29.4 s
                     -> fail b QueueFull: the first token is predicted 30.422 s after the arrival of the request, \
                        and slo_ttft_ms is 1000, retry after 29.4 s

it is refused on arrival if the wait for room alone is too long
  config max_in_flight_per_worker=1 slo_ttft_ms=3000.0
  fleet D
  arrives r0 max_tokens=1 -> decode r0#1 D
  arrives r1 max_tokens=1
  arrives r2 max_tokens=1
  arrives r3 max_tokens=1
  # A dispatch each second.
  time 1
  tokens_from r0#1 0 11   -> deliver r0 0: 11
  ends r0#1               -> finish r0 length, local, 1 tokens, first token 1, prefill 1; decode r1#1 D in 59 s
  time 1
  tokens_from r1#1 0 11   -> deliver r1 0: 11
  ends r1#1               -> finish r1 length, local, 1 tokens, first token 2, queue 1, prefill 1
                          -> decode r2#1 D in 58 s
  # The second in the queue waits for 2 s, the third for 3 s.
  arrives r4 max_tokens=1
  arrives r5 max_tokens=1
  arrives r6 max_tokens=1 -> refused QueueFull: the first token is predicted 4.000 s after the arrival of the \
                             request, and slo_ttft_ms is 3000

requests of a lower rank are not ahead
  config max_in_flight_per_worker=1 slo_ttft_ms=3000.0
  fleet D
  arrives r0 max_tokens=1 priority=1 -> decode r0#1 D
  arrives r1 max_tokens=1 priority=1
  arrives r2 max_tokens=1 priority=1
  arrives r3 max_tokens=1 priority=1
  time 1
  tokens_from r0#1 0 11              -> deliver r0 0: 11
  ends r0#1                          -> finish r0 length, local, 1 tokens, first token 1, prefill 1
                                     -> decode r1#1 D in 59 s
  time 1
  tokens_from r1#1 0 11              -> deliver r1 0: 11
  ends r1#1                          -> finish r1 length, local, 1 tokens, first token 2, queue 1, prefill 1
                                     -> decode r2#1 D in 58 s
  arrives r4 max_tokens=1 priority=1
  arrives r5 max_tokens=1 priority=1
  arrives urgent max_tokens=1
  arrives r6 max_tokens=1 priority=1 -> refused QueueFull: the first token is predicted 5.000 s after the arrival of \
                                        the request, and slo_ttft_ms is 3000
""",
    SHEDDING,
)


def test_the_wait_follows_the_intervals_between_dispatches() -> None:
    wait = QueueWait()
    assert wait.seconds(5) == 0.0, "unknown"
    wait.note_dispatch(10.0)
    wait.note_dispatch(12.0)
    assert wait.seconds(0) == 2.0
    wait.note_dispatch(22.0)
    assert wait.seconds(1) == 6.0, "an outlier moves it by an eighth"
    wait.note_empty()
    wait.note_dispatch(500.0)
    assert wait.seconds(1) == 6.0, "time without a queue is no interval"


def test_dispatches_at_one_moment_share_an_interval() -> None:
    wait = QueueWait()
    for moment in (10.0, 12.0, 14.0):
        for _ in range(4):
            wait.note_dispatch(moment)
    assert wait.seconds(0) == 0.5


def test_a_prediction_at_the_limit_is_admitted() -> None:
    shed = replace(CONFIG, admission="shed", slo_ttft_ms=1000.0)
    assert refusal(shed, 1.0, 60.0) is None
    assert refusal(shed, 1.001, 60.0) is not None
