"""When a request fails in the queue: no worker serves for too long, or its first token is predicted too late."""

from __future__ import annotations

from dataclasses import replace

from router.requests.admission import QueueWait, refusal
from tests.unit.router.driving_router import CONFIG, transcripts

# One worker for one request at a time, and a request that has waited for it longer than worker_wait_s.
QUEUED = """
  config max_in_flight_per_worker=1 report_stale_s=1000.0 worker_lost_s=1000.0
  fleet D
  arrives runs max_tokens=99 timeout_s=1000 -> decode runs#1 D in 1000 s
  arrives waits timeout_s=1000
  time 39.5
"""

test_a_time_without_a_worker = transcripts(
    """
a short absence of the only worker fails no request in the queue
  lost D  -> cancel runs#1
  time 19
  enter D -> decode runs#2 D in 941.5 s
  time 40

the wait ends worker_wait_s after the last worker was lost
  # Between two checks of the router.
  time 7
  lost D   -> cancel runs#1
  time 19.9
  time 0.2 -> fail runs WorkerUnavailable: no decode worker is serving, the last attempt failed: worker D was lost: \
              its process has ended
           -> fail waits WorkerUnavailable: no decode worker is serving
""",
    QUEUED,
)

test_a_request_without_a_worker = transcripts(
    """
the loss of another worker does not begin the wait again
  config report_stale_s=1000.0 worker_lost_s=1000.0
  fleet P D
  reports D draining
  arrives r
  time 10
  lost P    -> peers D left P
  time 10.1 -> fail r WorkerUnavailable: no decode worker is serving

requests wait as long as a start takes that the planner begins
  config worker_wait_s=7.0
  arrives r timeout_s=1000
  start_expected 60
  time 74.9
  start_expected 50
  time 0.2 -> fail r WorkerUnavailable: no decode worker is serving

a shorter time without workers ends requests that wait already
  arrives r
  time 5
  config worker_wait_s=7.0
  time 1.9
  time 0.2 -> fail r WorkerUnavailable: no decode worker is serving
"""
)

test_a_change_of_the_config = transcripts(
    """
calls beyond a lowered limit go on and a raised one is used at once
  fleet D
  arrives a                         -> decode a#1 D
  arrives b                         -> decode b#1 D
  config max_in_flight_per_worker=1
  reports D
  arrives c
  counts                            -> queued 1; in flight 2; deadlines 4
  config max_in_flight_per_worker=3 -> decode c#1 D

requests beyond a lowered queue bound wait on and new ones are refused
  arrives a
  arrives b
  config max_queued=1
  arrives c -> refused QueueFull: 2 requests are queued, and max_queued is 1
  counts    -> queued 2; in flight 0; deadlines 4

a silent worker is lost by the new limit
  fleet P D
  time 5
  reports P
  config worker_lost_s=4.0
  time 0.1 -> peers P left D
  time 4
  counts   -> queued 0; in flight 0; deadlines 0
"""
)

# A prompt of 8 tokens takes 0.41 s on workers that have measured their steps (`token_s`).
SHEDDING = """
  config admission=shed slo_ttft_ms=1000.0 max_queued=20
"""

test_a_request_that_would_be_late = transcripts(
    """
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

requests that pass one of another size tell nothing of the wait for room
  config max_in_flight_per_worker=2
  enter small blocks=8
  enter large
  stream_lost large
  arrives long max_tokens=32
  arrives s1 -> decode s1#1 small
  time 2
  arrives s2 -> decode s2#1 small
  arrives s3
  arrives s4

a request that has streamed tokens is never refused
  fleet D1 D2
  arrives r            -> decode r#1 D1
  tokens_from r#1 0 11 -> deliver r 0: 11
  reports D1 token_s=0.05 backlog=30.0
  reports D2 token_s=0.05 backlog=30.0
  decode_error r#1 WorkerUnavailable connection reset -> decode r#2 D2 behind 11

a call is refused with all its choices
  fleet D
  reports D token_s=0.05 backlog=30.0
  arrives a others=b -> fail a QueueFull: the first token is predicted 30.422 s after the arrival of the request, \
                        and slo_ttft_ms is 1000, retry after 29.4 s
                     -> fail b QueueFull: the first token is predicted 30.422 s after the arrival of the request, \
                        and slo_ttft_ms is 1000, retry after 29.4 s

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
    wait = QueueWait()
    for moment in (10.0, 12.0, 14.0):
        for _ in range(4):
            wait.note_dispatch(moment)
    assert wait.seconds(0) == 0.5, "dispatches at one moment share an interval"


def test_a_prediction_at_the_limit_is_admitted() -> None:
    shed = replace(CONFIG, admission="shed", slo_ttft_ms=1000.0)
    assert refusal(shed, 1.0, 60.0) is None
    assert refusal(shed, 1.001, 60.0) is not None
