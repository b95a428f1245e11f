"""Requests that wait in the router: choices, tenants, unequal pools and room.

The queue is priced again only when room has changed. `test_admission.py` has the requests that fail in it.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

from tests.unit.router.driving_router import CONFIG, DrivenRouter, transcripts

test_choices_of_a_call = transcripts(
    """
the other choices start beside the first one and go elsewhere if that worker fails them
  # The prompt moves once.
  fleet P D1 D2
  arrives a others=b,c                 -> decode a#1 D1 from P/1; prefill a#1 P for D1/1
  prefilled a#1 11                     -> deliver a 0: 11
  tokens_from a#1 0 11                 -> decode b#1 D1; decode c#1 D1
  decode_error b#1 TransferFailed once -> decode b#2 D2 from P/2; prefill b#2 P for D2/2

the other choices of a call whose first token is the last one find the prompt where it was computed
  fleet P1 P2 D
  arrives a max_tokens=1 others=b -> decode a#1 D from P1/1; prefill a#1 P1 for D/1
  prefilled a#1 11 ends=length    -> deliver a 0: 11; cancel a#1; withdraw a#1 P1/1
                                  -> finish a length, disaggregated, 1 tokens
                                  -> decode b#1 D from P1/2; prefill b#1 P1 for D/2

the other choices start anywhere if no worker has the prompt
  fleet P D
  arrives a others=b                   -> decode a#1 D from P/1; prefill a#1 P for D/1
  prefilled a#1 11                     -> deliver a 0: 11
  decode_error a#1 TransferFailed once -> withdraw a#1 P/1; decode a#2 D behind 11
  stopped a                            -> cancel a#2; finish a stop, recomputed, 1 tokens, attempts 2
                                       -> decode b#1 D from P/2; prefill b#1 P for D/2

the other choices start anywhere once the worker that has the prompt is lost
  # Another process has its name.
  config max_in_flight_per_worker=1
  fleet P D
  arrives a others=b      -> decode a#1 D from P/1; prefill a#1 P for D/1
  prefilled a#1 11        -> deliver a 0: 11
  tokens_from a#1 0 11
  enter D incarnation=2   -> peers P left D; cancel a#1; withdraw a#1 P/1; peers D owner P; peers P reader D@2
                          -> decode a#2 D from P/2 behind 11; prefill a#2 P for D@2/2 behind 11
  stopped a               -> cancel a#2; withdraw a#2 P/2
                          -> finish a stop, recomputed, 1 tokens, attempts 2, cached 8
                          -> decode b#1 D from P/3; prefill b#1 P for D@2/3

a call is admitted or refused as a whole
  config max_in_flight_per_worker=1 max_queued=1
  fleet D
  arrives a max_tokens=2 others=b,c -> decode a#1 D
  arrives late others=later         -> refused QueueFull: 2 requests are queued, and max_queued is 1
  tokens_from a#1 0 11              -> deliver a 0: 11
  tokens_from a#1 1 12              -> deliver a 1: 12
  ends a#1                          -> finish a length, local, 2 tokens; decode b#1 D
  tokens_from b#1 0 21 22           -> deliver b 0: 21 22
  ends b#1                          -> finish b length, local, 2 tokens; decode c#1 D
  tokens_from c#1 0 31 32           -> deliver c 0: 31 32
  ends c#1                          -> finish c length, local, 2 tokens
  arrives late others=later         -> decode late#1 D

choices that follow are refused with the first that cannot be of use without them
  config max_in_flight_per_worker=2 max_queued=3
  fleet D
  arrives a following=5
  -> refused InvalidRequest: prompt: too many: 5 choices follow this one, workers take 2 at once, and max_queued is 3
  arrives a following=4          -> decode a#1 D
  arrives b following=4          -> refused QueueFull: 0 requests are queued, 4 follow this one, and max_queued is 3
  arrives b following=3          -> decode b#1 D
  arrives c tenant=c following=2 ->
  arrives d tenant=c following=2 -> refused QueueFull: 1 requests are queued, 2 follow this one, and max_queued is 3
  arrives d tenant=c following=1 ->
  arrives e tenant=e following=2 ->  # a tenant that has less than another

the other choices fail with the last attempt of the first one
  fleet D
  arrives a others=b                  -> decode a#1 D
  decode_error a#1 TransferFailed bad -> decode a#2 D
  decode_error a#2 TransferFailed bad
  time 1                              -> decode a#3 D in 59.95 s
  decode_error a#3 TransferFailed bad -> fail a TransferFailed: bad; fail b TransferFailed: bad

a held choice that is cancelled never starts
  fleet D
  arrives a others=b,c -> decode a#1 D
  cancelled b          -> fail b RequestCancelled: cancelled by the client
  tokens_from a#1 0 11 -> deliver a 0: 11; decode c#1 D

the time of a held choice counts as time in the queue
  fleet D
  arrives a max_tokens=1 others=b -> decode a#1 D
  time 2
  tokens_from a#1 0 11            -> deliver a 0: 11; decode b#1 D in 58 s
  reports D
  tokens_from b#1 0 11            -> deliver b 0: 11
  ends b#1                        -> finish b length, local, 1 tokens, first token 2, queue 2

a full worker fails a call before its first token
  fleet D
  arrives a                          -> decode a#1 D
  decode_error a#1 QueueFull no room
  reports D                          -> decode a#2 D
  decode_error a#2 QueueFull no room
  time 1
  reports D                          -> decode a#3 D in 59 s
  decode_error a#3 QueueFull no room -> fail a QueueFull: no room

a full worker fails no call that has tokens before its deadline
  config max_attempts=1 report_stale_s=100.0 worker_lost_s=100.0
  fleet D
  arrives a others=b   -> decode a#1 D
  # Choice b has no token, but the call has.
  tokens_from a#1 0 11 -> deliver a 0: 11; decode b#1 D
  decode_error a#1 QueueFull no room
  decode_error b#1 QueueFull no room
  reports D            -> decode a#2 D behind 11; decode b#2 D
  decode_error a#2 QueueFull no room
  decode_error b#2 QueueFull no room
  time 60              -> fail a DeadlineExceeded: the deadline passed in stage queue
                       -> fail b DeadlineExceeded: the deadline passed in stage queue
"""
)

# One worker for one request at a time. It computes f0, and the queue is full of requests of one tenant.
FLOODED = """
  config max_in_flight_per_worker=1 max_queued=3
  fleet D
  arrives f0 tenant=flood max_tokens=2 -> decode f0#1 D
  arrives f1 tenant=flood max_tokens=2
  arrives f2 tenant=flood max_tokens=2
  arrives f3 tenant=flood max_tokens=2
"""

test_tenants = transcripts(
    """
a full queue gives up the newest request of the tenant with most
  arrives more tenant=flood  -> refused QueueFull: 3 requests are queued, and max_queued is 3
  arrives other tenant=quiet -> fail f3 QueueFull: 3 requests are queued, and max_queued is 3
  arrives third tenant=third -> fail f2 QueueFull: 3 requests are queued, and max_queued is 3
  counts                     -> queued 3; in flight 1; deadlines 7

a full queue gives up nothing for a request of lower priority
  arrives other tenant=quiet priority=1 -> refused QueueFull: 3 requests are queued, and max_queued is 3
""",
    FLOODED,
)

test_pools_of_unequal_size = transcripts(
    """
a decode worker gets only requests that fit its whole pool
  # 34 tokens, of which the last one needs no slot, do not fit 8 blocks; 33 do.
  enter small blocks=8
  enter large
  arrives r1 max_tokens=26 -> decode r1#1 large
  arrives r2 max_tokens=26 -> decode r2#1 large
  arrives r3 max_tokens=25 -> decode r3#1 small

a prefill worker gets only prompts that fit its whole pool
  enter P1 blocks=8
  enter P2
  enter D              -> peers D owner P1 owner P2; peers P1 reader D; peers P2 reader D
  arrives r1 prompt=33 -> decode r1#1 D from P2/1; prefill r1#1 P2 for D/1
  arrives r2 prompt=33 -> decode r2#1 D from P2/2; prefill r2#1 P2 for D/2
  arrives r3 prompt=32 -> decode r3#1 D from P1/3; prefill r3#1 P1 for D/3

the decode worker computes a prompt that no prefill worker can hold, and one that fits waits for the prefill worker
  enter P blocks=8
  enter D             -> peers D owner P; peers P reader D
  stream_lost P
  arrives r prompt=33 -> decode r#1 D
  arrives w prompt=32

a request that waits for a large pool lets shorter ones pass and goes first when it has room
  enter small blocks=8
  enter large
  stream_lost large
  arrives long max_tokens=32
  arrives short -> decode short#1 small
  arrives longer max_tokens=33
  reports large -> decode long#1 large; decode longer#1 large

a request fails once no worker that can hold it has served for long enough
  config worker_lost_s=100.0 report_stale_s=100.0
  enter small blocks=8
  enter large
  reports large draining
  arrives long max_tokens=32
  time 19.9
  time 0.2 -> fail long WorkerUnavailable: no decode worker that holds 40 tokens is serving

a request too large for every decode worker is refused at once
  enter small blocks=8
  enter large
  arrives fits max_tokens=249 -> decode fits#1 large
  arrives r max_tokens=250    -> refused InvalidRequest: max_tokens: prompt (8) + max_tokens (250) is 258, over the \
                                 context of 257 tokens of the largest decode worker
  arrives r prompt=257        -> refused InvalidRequest: prompt: prompt (257) + max_tokens (4) is 261, over the \
                                 context of 257 tokens of the largest decode worker
  counts                      -> queued 0; in flight 1; deadlines 1
"""
)

test_room = transcripts(
    """
a prompt that waits for the last prefill worker runs without it once that is gone
  config max_in_flight_per_worker=1
  fleet P D1 D2
  arrives runs       -> decode runs#1 D1 from P/1; prefill runs#1 P for D1/1
  arrives waits
  reports P draining -> decode waits#1 D2
"""
)


def count_prices(router: DrivenRouter) -> Mock:
    """Called once for each request that is priced."""
    workers = router.machine.workers
    counted = Mock(wraps=workers.choose)
    workers.choose = counted  # type: ignore[method-assign]
    return counted


def full_router() -> DrivenRouter:
    """Request `runs` fills the only decode worker; `waits` is queued, and a prefill worker is idle."""
    router = DrivenRouter(replace(CONFIG, max_in_flight_per_worker=1, max_queued=2_000), prefill=("P1", "P2"))
    router.arrives("runs")
    router.arrives("waits")
    return router


def test_reports_tokens_and_later_requests_price_nothing_while_no_room_is_gained() -> None:
    router = full_router()
    prices = count_prices(router)
    for number in range(50):
        router.reports("D", num_running=1, num_queued_tokens=50 - number)
        router.caches("D", 4 * number)
        router.tokens_from("runs#1", 0, 11)
        router.arrives(f"later-{number}")
    assert prices.call_count == 0
    assert [router.seen(action) for action in router.ends("runs#1")][-2].startswith("decode waits#1 D")
    assert prices.call_count == 2, "the first of the queue finds room, and the next one finds none"
