"""A request from its arrival to its one end: its calls, tokens, deadlines and its cancellation.

The machine takes tokens by the step. The end of a call and its tokens arrive in any order.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.step import SampledToken
from router.requests import events
from tests.unit.router.driving_router import DrivenRouter, request, step_tokens, transcripts

test_calls = transcripts(
    """
a request finishes if the prefill worker answers after the decode worker
  fleet P D
  arrives r num_logprobs=0    -> decode r#1 D from P/1; prefill r#1 P for D/1
  # The decode worker has no log-probability of the first token.
  tokens_from r#1 0 10
  tokens_from r#1 1 11..13 logprob=-1
  ends r#1
  prefilled r#1 10 logprob=-1 -> deliver r 0: 10..13 logprobs; finish r length, disaggregated, 4 tokens

a request is retried if both calls end and a token is missing
  fleet P D
  arrives r        -> decode r#1 D from P/1; prefill r#1 P for D/1
  tokens_from r#1 2 13
  ends r#1
  prefilled r#1 11 -> deliver r 0: 11; decode r#2 D behind 11

a first token that is also the last one cancels the decode call and drops its hand-off
  fleet P D
  arrives r max_tokens=1                  -> decode r#1 D from P/1; prefill r#1 P for D/1
  prefilled r#1 11 ends=length handoff=kv -> deliver r 0: 11; cancel r#1; withdraw r#1 P/1
                                          -> finish r length, disaggregated, 1 tokens

the hand-off of an engine goes to the decode worker before the first token to the client
  fleet P D
  arrives r                   -> decode r#1 D from P/1; prefill r#1 P for D/1
  time 2
  prefilled r#1 11 handoff=kv -> hand over r#1 D/1 kv in 58 s; deliver r 0: 11

no hand-off goes to a decode call that has returned
  fleet P D
  arrives r                   -> decode r#1 D from P/1; prefill r#1 P for D/1
  tokens_from r#1 1 12
  ends r#1 num_tokens=2
  prefilled r#1 11 handoff=kv -> deliver r 0: 11 12; finish r length, disaggregated, 2 tokens

a stop string ends the request and its calls
  fleet P D
  arrives r        -> decode r#1 D from P/1; prefill r#1 P for D/1
  prefilled r#1 11 -> deliver r 0: 11
  time 2
  stopped r        -> cancel r#1; withdraw r#1 P/1
                   -> finish r stop, disaggregated, 1 tokens, block seconds 6, decode 2
  tokens_from r#1 1 12
  ends r#1

of a prompt whose worker does not answer before the stop string, the block seconds are an estimate too
  enter D token_s=0.5
  arrives alone            -> decode alone#1 D
  time 5
  tokens_from alone#1 0 11 -> deliver alone 0: 11
  time 2
  stopped alone -> cancel alone#1
   -> finish alone stop, local, 1 tokens, first token 5, block seconds 10.01, prefill 5, decode 2

with no prefill worker the decode worker computes the prompt, and the timeline has the time of each stage
  arrives r
  time 2
  enter D              -> decode r#1 D in 58 s
  time 3
  tokens_from r#1 0 11 -> deliver r 0: 11
  time 1
  ends r#1             -> finish r length, local, 1 tokens, first token 5, queue 2, prefill 3, decode 1

the outcome has the cached tokens and the times of the prefill worker
  fleet P D
  arrives r max_tokens=2                 -> decode r#1 D from P/1; prefill r#1 P for D/1
  prefilled r#1 11 cached=4 queue_s=0.25 -> deliver r 0: 11
  tokens_from r#1 1 12                   -> deliver r 1: 12
  ends r#1                               -> finish r length, disaggregated, 2 tokens, cached 4, queue of the worker \
                                            0.25

the cached tokens are those that the router had predicted, if the worker that computed the prompt does not tell them
  enter D cached=4
  arrives alone                          -> decode alone#1 D
  tokens_from alone#1 0 11               -> deliver alone 0: 11
  stopped alone                          -> cancel alone#1; finish alone stop, local, 1 tokens, cached 4
  fleet P
  caches P 8
  arrives early                          -> decode early#1 D from P/1; prefill early#1 P for D/1
  tokens_from early#1 0 11               -> deliver early 0: 11
  stopped early                          -> cancel early#1; withdraw early#1 P/1
                                         -> finish early stop, disaggregated, 1 tokens, cached 7
  # The decode worker has its own figure, of what it did not read.
  arrives r                              -> decode r#1 D from P/2; prefill r#1 P for D/2
  tokens_from r#1 0 11..14               -> deliver r 0: 11..14
  prefill_error r#1 WorkerUnavailable lost
  ends r#1 cached_tokens=4               -> finish r length, disaggregated, 4 tokens, cached 7

a prefill worker whose call has failed has room for the next prompt
  config max_in_flight_per_worker=1
  fleet P D1 D2
  arrives a            -> decode a#1 D1 from P/1; prefill a#1 P for D1/1
  tokens_from a#1 0 11 -> deliver a 0: 11
  arrives b
  prefill_error a#1 WorkerUnavailable connection reset -> decode b#1 D2 from P/2; prefill b#1 P for D2/2

a silent worker gets no request and is then lost
  fleet D
  time 3.1
  arrives r
  reports D -> decode r#1 D
  time 10.1 -> cancel r#1
  counts    -> queued 1; in flight 0; deadlines 2

a resumed request goes on behind its delivered tokens, and its end counts all
  fleet D
  arrives r max_tokens=5 resumed=11..13 -> decode r#1 D behind 11..13
  tokens_from r#1 3 14 15               -> deliver r 3: 14 15
  ends r#1 cached_tokens=4              -> finish r length, local, 5 tokens, cached 4, recomputed 7, resumed 3

a resumed stream leaves the queue before new requests
  arrives new
  arrives r resumed=11..13
  enter D -> decode r#1 D behind 11..13; decode new#1 D
"""
)

test_ends = transcripts(
    """
a request ends at its deadline during its prompt
  fleet P D
  arrives r timeout_s=5 -> decode r#1 D from P/1 in 5 s; prefill r#1 P for D/1 in 5 s
  time 4.9
  time 0.2              -> cancel r#1; withdraw r#1 P/1
                        -> fail r DeadlineExceeded: the deadline passed in stage prefill
  counts                -> queued 0; in flight 0; deadlines 0

a request that is cancelled in the queue ends at once
  fleet P
  arrives r
  cancelled r -> fail r RequestCancelled: cancelled by the client
  counts      -> queued 0; in flight 0; deadlines 0

a cancelled request ends with its calls
  fleet P D
  arrives r   -> decode r#1 D from P/1; prefill r#1 P for D/1
  cancelled r -> cancel r#1; withdraw r#1 P/1; fail r RequestCancelled: cancelled by the client
  tokens_from r#1 1 12
  ends r#1
  cancelled r
  counts      -> queued 0; in flight 0; deadlines 0

a second token shows that an offer has a reader
  fleet P D
  arrives a        -> decode a#1 D from P/1; prefill a#1 P for D/1
  prefilled a#1 11 -> deliver a 0: 11
  arrives b        -> decode b#1 D from P/2; prefill b#1 P for D/2
  prefilled b#1 21 -> deliver b 0: 21
  tokens_from a#1 1 12 -> deliver a 1: 12
  ends a#1 num_tokens=4
  cancelled a      -> fail a RequestCancelled: cancelled by the client
  cancelled b      -> cancel b#1; withdraw b#1 P/2; fail b RequestCancelled: cancelled by the client
  counts           -> queued 0; in flight 0; deadlines 0
"""
)

test_tokens = transcripts(
    """
one message brings each request the run of its new tokens
  fleet D
  arrives a -> decode a#1 D
  arrives b -> decode b#1 D
  step a#1:0:11 b#1:0:21 a#1:1:12 b#1:1:22 a#1:2:13 -> deliver a 0: 11..13; deliver b 0: 21 22

log-probabilities go to the requests that asked for them
  fleet D
  arrives plain                        -> decode plain#1 D
  arrives asks num_logprobs=1          -> decode asks#1 D
  tokens_from plain#1 0 7              -> deliver plain 0: 7
  tokens_from asks#1 0 11 logprob=-0.5 -> deliver asks 0: 11 logprobs
  # A token without them is not for the request that asked.
  step asks#1:1:12 plain#1:1:8         -> deliver plain 1: 8

tokens that never follow the end are generated by another worker
  fleet D1 D2
  arrives r               -> decode r#1 D1
  tokens_from r#1 0 11 12 -> deliver r 0: 11 12
  ends r#1 num_tokens=4
  time 4.9
  reports D2
  time 0.2                -> decode r#2 D2 behind 11 12 in 55 s
  # The first attempt is over.
  tokens_from r#1 2 66 66
  tokens_from r#2 2 13 14 -> deliver r 2: 13 14
  ends r#2                -> finish r length, recomputed, 4 tokens, attempts 2, recomputed 10, prefill 0.1, decode 5

a late answer of the prefill worker is not the fault of the decode worker
  # All tokens of the stream have arrived. Only the prefill worker sends the first one with its log-probabilities.
  fleet P D
  arrives r num_logprobs=0      -> decode r#1 D from P/1; prefill r#1 P for D/1
  ends r#1 num_tokens=4
  tokens_from r#1 1 12..14 logprob=-0.5
  time 5.1
  prefilled r#1 11 logprob=-0.5 -> deliver r 0: 11..14 logprobs
                                -> finish r length, disaggregated, 4 tokens, first token 5.1, prefill 5.1

the end waits half a second for the answer of the prefill worker, which has the cached tokens
  fleet P D
  arrives r                         -> decode r#1 D from P/1; prefill r#1 P for D/1
  tokens_from r#1 0 11..14          -> deliver r 0: 11..14
  ends r#1 cached_tokens=8
  prefilled r#1 11 cached=4         -> finish r length, disaggregated, 4 tokens, cached 4
  arrives late                      -> decode late#1 D from P/2; prefill late#1 P for D/2
  tokens_from late#1 0 21..24       -> deliver late 0: 21..24
  ends late#1
  time 0.4
  time 0.2                          -> cancel late#1; finish late length, disaggregated, 4 tokens, decode 0.5
  # The deadline of the request cannot fail it any more.
  arrives short timeout_s=0.3       -> decode short#1 D from P/3 in 0.3 s; prefill short#1 P for D/3 in 0.3 s
  tokens_from short#1 0 31..34      -> deliver short 0: 31..34
  ends short#1
  time 0.4                          -> cancel short#1; finish short length, disaggregated, 4 tokens, decode 0.3
  counts                            -> queued 0; in flight 0; deadlines 0

of a prefill worker that never answers, the time and the block seconds of the prompt are an estimate
  enter P token_s=0.5
  enter D token_s=5           -> peers D owner P; peers P reader D
  arrives r                   -> decode r#1 D from P/1; prefill r#1 P for D/1
  time 5
  tokens_from r#1 0 11..14    -> deliver r 0: 11..14
  ends r#1 kv_block_seconds=1
  time 0.6 -> cancel r#1
   -> finish r length, disaggregated, 4 tokens, first token 5, block seconds 5.01, prefill 5, decode 0.5

the end does not wait for a prefill worker that fails or is lost
  fleet P D
  arrives a                         -> decode a#1 D from P/1; prefill a#1 P for D/1
  arrives b                         -> decode b#1 D from P/2; prefill b#1 P for D/2
  step a#1:0:11 a#1:1:12 b#1:0:21 b#1:1:22 -> deliver a 0: 11 12; deliver b 0: 21 22
  ends a#1 num_tokens=2
  ends b#1 num_tokens=2
  prefill_error a#1 WorkerUnavailable reset -> finish a length, disaggregated, 2 tokens
  lost P                            -> peers D left P; cancel b#1 P; finish b length, disaggregated, 2 tokens

a lost stream sends every request with tokens to come to another worker
  fleet D1
  arrives a max_tokens=2 -> decode a#1 D1
  arrives b max_tokens=2 -> decode b#1 D1
  tokens_from a#1 0 11   -> deliver a 0: 11
  tokens_from b#1 0 21   -> deliver b 0: 21
  # The last token is still on the stream, and the call has returned.
  ends b#1 num_tokens=2
  enter D2
  stream_lost D1         -> cancel a#1; decode a#2 D2 behind 11; decode b#2 D2 behind 21
"""
)


def test_the_prediction_is_that_of_the_dispatch_before_the_first_token() -> None:
    router = DrivenRouter(prefill=("P1", "P2"))
    router.arrives("r")
    router.now += 3.0
    router.prefill_error("r#1", "WorkerUnavailable")
    router.prefilled("r#2", 11)
    router.now += 5.0
    router.decode_error("r#2", "WorkerUnavailable")
    router.reports("P2")
    router.reports("D")
    router.tokens_from("r#3", 1, "12..14")
    router.prefilled("r#3", 11)
    router.ends("r#3")
    (finish,) = router.of(events.Finish)
    assert (finish.outcome.attempts, finish.outcome.first_token_s) == (3, 3.0)
    assert 3.0 < finish.outcome.predicted_first_token_s < 4.0


MESSAGES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=12)


@given(MESSAGES, st.integers(0, 12), st.booleans())
def test_each_index_is_delivered_once_and_in_order_whatever_arrives(
    messages: list[list[int]], end_at: int, with_logprobs: bool
) -> None:
    """Messages repeat, skip and reorder indexes, and the end comes at any place; then everything arrives."""
    router = DrivenRouter(prefill=())
    router.arrive(request(max_tokens=6, num_logprobs=0 if with_logprobs else None))
    call = router.call_of("r#1")

    def send(indexes: list[int]) -> None:
        tokens = (SampledToken(10 + index, -1.0 if with_logprobs else None) for index in indexes)
        router.post(step_tokens(*((call, index, token) for index, token in zip(indexes, tokens, strict=True))))

    for place, indexes in enumerate([*messages, list(range(6))]):
        if place == min(end_at, len(messages)):
            router.ends("r#1", num_tokens=6)
        send(indexes)
    tokens = [(d.first_index + i, token) for d in router.of(events.Deliver) for i, token in enumerate(d.token_ids)]
    assert tokens == [(index, 10 + index) for index in range(6)]
    (finish,) = router.of(events.Finish)
    assert finish.outcome.attempts == 1
    logprobs = [token.token_id for action in router.of(events.Deliver) for token in action.logprobs]
    assert logprobs == ([10, 11, 12, 13, 14, 15] if with_logprobs else [])
