"""A request continues on another worker after a failure, or ends with the error."""

from __future__ import annotations

import pytest

from core.config import RouterConfig
from tests.unit.router.driving_router import transcripts

test_failures = transcripts(
    """
after the loss of a prefill worker the request goes to another pair
  fleet P1 P2 D
  arrives r -> decode r#1 D from P1/1; prefill r#1 P1 for D/1
  lost P1   -> peers D left P1; cancel r#1; decode r#2 D from P2/2; prefill r#2 P2 for D/2

the loss of a prefill worker after the hand-off changes nothing
  fleet P D
  arrives r                -> decode r#1 D from P/1; prefill r#1 P for D/1
  tokens_from r#1 0 11     -> deliver r 0: 11
  lost P                   -> peers D left P; cancel r#1 P
  tokens_from r#1 1 12..14 -> deliver r 1: 12..14
  ends r#1                 -> finish r length, disaggregated, 4 tokens

the loss of a prefill worker that has the only token ends its call, where the decode call has ended
  fleet P D
  arrives r max_tokens=1   -> decode r#1 D from P/1; prefill r#1 P for D/1
  ends r#1
  lost P                   -> peers D left P; cancel r#1; decode r#2 D

after the loss of a decode worker another one continues at the next index
  fleet P D1 D2
  arrives r               -> decode r#1 D1 from P/1; prefill r#1 P for D1/1
  prefilled r#1 11        -> deliver r 0: 11
  tokens_from r#1 1 12    -> deliver r 1: 12
  lost D1                 -> peers P left D1; cancel r#1; decode r#2 D2 from P/2 behind 11 12
                          -> prefill r#2 P for D2/2 behind 11 12
  # tokens of the lost worker are dropped
  tokens_from r#1 2 66
  tokens_from r#2 2 13 14 -> deliver r 2: 13 14
  prefilled r#2 13 index=2
  ends r#2                -> finish r length, recomputed, 4 tokens, attempts 2, recomputed 10

a request finishes if its worker dies between the last token and the result
  fleet D
  arrives by_length max_tokens=2  -> decode by_length#1 D
  arrives by_eos                  -> decode by_eos#1 D
  tokens_from by_length#1 0 11 12 -> deliver by_length 0: 11 12
  tokens_from by_eos#1 0 11 0     -> deliver by_eos 0: 11 0
  lost D                          -> cancel by_length#1; finish by_length length, local, 2 tokens; cancel by_eos#1
                                  -> finish by_eos stop, local, 2 tokens

a request finishes if its decode worker dies after its result and before the first token
  fleet P D
  arrives r num_logprobs=0 max_tokens=1 -> decode r#1 D from P/1; prefill r#1 P for D/1
  ends r#1
  lost D                                -> peers P left D
  prefilled r#1 10 logprob=-1           -> deliver r 0: 10 logprobs; finish r length, disaggregated, 1 tokens

a prompt does not end at a token that its worker did not send
  fleet P1 P2 D
  arrives r                            -> decode r#1 D from P1/1; prefill r#1 P1 for D/1
  prefilled r#1 11 index=3 ends=length -> cancel r#1; withdraw r#1 P1/1
                                       -> decode r#2 D from P2/2; prefill r#2 P2 for D/2
  prefilled r#2 11 ends=length         -> deliver r 0: 11; cancel r#2; withdraw r#2 P2/2
                                       -> finish r length, recomputed, 1 tokens, attempts 2, recomputed 8

after a failed hand-off the next attempt avoids both workers
  fleet P1 P2 D1 D2
  arrives r -> decode r#1 D1 from P1/1; prefill r#1 P1 for D1/1
  decode_error r#1 TransferFailed lease expired -> cancel r#1; withdraw r#1 P1/1
                                                -> decode r#2 D2 from P2/2; prefill r#2 P2 for D2/2

tokens that came too early in a failed attempt are not used
  fleet D1 D2
  arrives r                               -> decode r#1 D1
  tokens_from r#1 2 66
  decode_error r#1 WorkerUnavailable died -> decode r#2 D2
  tokens_from r#2 0 11 12                 -> deliver r 0: 11 12

a worker that was full is asked again before one that failed
  fleet D1 D2 D3
  arrives r                          -> decode r#1 D1
  decode_error r#1 QueueFull no room -> decode r#2 D2
  reports D1
  decode_error r#2 TransferFailed bad
  time 0.05                          -> decode r#3 D1 in 59.95 s

a resumed request waits for room beyond max_attempts
  config max_attempts=1
  fleet D
  arrives r max_tokens=8 resumed=11..13 -> decode r#1 D behind 11..13
  decode_error r#1 QueueFull no room
  reports D                             -> decode r#2 D behind 11..13

after progress max_attempts without a token end the request
  fleet D
  arrives r                               -> decode r#1 D
  tokens_from r#1 0 11                    -> deliver r 0: 11
  decode_error r#1 TransferFailed fault 1 -> decode r#2 D behind 11
  decode_error r#2 TransferFailed fault 2 -> decode r#3 D behind 11
  time 0.1
  decode_error r#3 TransferFailed fault 3
  time 0.2                                -> decode r#4 D behind 11 in 59.85 s
  decode_error r#4 TransferFailed fault 4 -> fail r TransferFailed: fault 4

an error that is not retryable ends the request
  fleet P D
  arrives r -> decode r#1 D from P/1; prefill r#1 P for D/1
  prefill_error r#1 TandemError the step failed -> cancel r#1; fail r TandemError: the step failed

a worker without memory gets nothing until it reports again
  # Its failed requests make it empty. Without the pause it would attract every request.
  config max_queued=8
  fleet D1 D2
  reports D2 num_calls=50 num_decoding=50 decode_context=50000
  arrives r -> decode r#1 D1
  decode_error r#1 OutOfDeviceMemory no memory -> decode r#2 D2
  arrives s -> decode s#1 D2
  arrives t -> decode t#1 D2
  reports D1
  arrives u -> decode u#1 D1

requests of a restarted worker are dispatched again
  fleet D
  arrives r             -> decode r#1 D
  enter D incarnation=2 -> cancel r#1; decode r#2 D

a fresh snapshot of the same process leaves its dispatches open
  fleet D
  arrives r                -> decode r#1 D
  enter D
  tokens_from r#1 0 11..14 -> deliver r 0: 11..14
  ends r#1                 -> finish r length, local, 4 tokens

a restarted worker with another layout is refused and changes nothing
  fleet P D
  arrives r                           -> decode r#1 D from P/1; prefill r#1 P for D/1
  enter D incarnation=2 model=another -> refused LayoutMismatch: KV layouts differ in model: 'm' here, 'another' there
  counts                              -> queued 0; in flight 1; deadlines 1
  lost D                              -> peers P left D; cancel r#1; withdraw r#1 P/1

the second attempt starts at once and the third after a pause
  config max_attempts=4
  fleet D
  arrives r                               -> decode r#1 D
  decode_error r#1 TransferFailed fault 1 -> decode r#2 D
  decode_error r#2 TransferFailed fault 2
  # Another request does not wait for one that pauses.
  arrives next                            -> decode next#1 D
  time 0.049
  time 0.002                              -> decode r#3 D in 59.95 s
  # The next pause is twice as long.
  decode_error r#3 TransferFailed fault 3
  time 0.098
  time 0.003                              -> decode r#4 D in 59.849 s

a prompt that a worker has computed goes back to it
  # A decode worker that drains has not begun, so the attempt does not count. No report says yet what P2 has cached.
  config max_attempts=1
  fleet P1 D1 D2
  reports P1 num_calls=99
  enter P2                -> peers P2 reader D1 reader D2; peers D1 owner P2; peers D2 owner P2
  arrives r               -> decode r#1 D1 from P2/1; prefill r#1 P2 for D1/1
  reports P1
  prefilled r#1 7         -> deliver r 0: 7
  decode_error r#1 WorkerDrains the worker drains -> withdraw r#1 P2/1; decode r#2 D2 from P2/2 behind 7
                          -> prefill r#2 P2 for D2/2 behind 7
  prefilled r#2 8 index=1 -> deliver r 1: 8
  tokens_from r#2 2 9 10  -> deliver r 2: 9 10
  ends r#2                -> finish r length, disaggregated, 4 tokens, recomputed 9

a retry is routed by the prompt and its delivered tokens
  # P2 has the delivered tokens cached, too, and so has fewer tokens to compute.
  fleet P1 P2 D1 D2
  arrives r max_tokens=20            -> decode r#1 D1 from P1/1; prefill r#1 P1 for D1/1
  prefilled r#1 9                    -> deliver r 0: 9
  tokens_from r#1 1 10..12           -> deliver r 1: 10..12
  caches P2 12
  caches P1 8
  decode_error r#1 QueueFull no room -> decode r#2 D2 from P2/2 behind 9..12; prefill r#2 P2 for D2/2 behind 9..12

a retry goes to the decode worker alone that has nearly all of its blocks
  fleet P D1 D2
  arrives r prompt=32                     -> decode r#1 D1 from P/1; prefill r#1 P for D1/1
  prefilled r#1 33                        -> deliver r 0: 33
  caches D2 32
  decode_error r#1 WorkerUnavailable died -> withdraw r#1 P/1; decode r#2 D2 behind 33
"""
)


@pytest.mark.parametrize(("attempts", "pause_s"), [(1, 0.0), (2, 0.05), (3, 0.1), (6, 0.8), (7, 1.0), (10_000, 1.0)])
def test_a_pause_is_bounded(attempts: int, pause_s: float) -> None:
    assert RouterConfig().pause_after(attempts) == pytest.approx(pause_s)
