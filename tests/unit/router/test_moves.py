"""A decode worker asks to move a request: the router chooses the target, and takes each token from one of the two."""

from tests.unit.router.driving_router import transcripts

# r#1 has four of its twenty tokens from D1, which drains.
MOVING = """
  fleet P D1 D2
  reports D2 draining
  arrives r max_tokens=20  -> decode r#1 D1 from P/1; prefill r#1 P for D1/1
  prefilled r#1 10         -> deliver r 0: 10
  tokens_from r#1 1 11..13 -> deliver r 1: 11..13
  reports D2 takes_moves=1
  reports D1 draining takes_moves=1
"""

ASKED = (
    MOVING
    + """
  asks r#1 -> decode r#2 D2 from D1/2 behind 10..13 moves; move r#1 D1 to r#2 D2/2 12 tokens
"""
)

test_a_move = transcripts(
    """
both workers send tokens and each index is delivered once
  tokens_from r#1 4 14 15  -> deliver r 4: 14 15
  hands_over r#1 6
  tokens_from r#2 4 14 15
  hands_over r#2 6
  tokens_from r#2 6 16     -> deliver r 6: 16
  tokens_from r#1 6 99
  ends r#1 handoff kv_block_seconds=2.0 recomputed_tokens=3 transferred_bytes=7
  tokens_from r#2 7 17..29 -> deliver r 7: 17..29
  ends r#2                 -> finish r length, migrated, 20 tokens, moves 1, recomputed 3, bytes 7, block seconds 2
  counts                   -> queued 0; in flight 0; deadlines 0; drain moved 1

a stop string after a move leaves what the source has told, and its block seconds count once
  time 2
  hands_over r#1 4
  tokens_from r#2 4 14     -> deliver r 4: 14
  ends r#1 handoff kv_block_seconds=40.0 transferred_bytes=7
  time 2
  tokens_from r#2 5 15     -> deliver r 5: 15
  stopped r                -> cancel r#2
                           -> finish r stop, migrated, 6 tokens, moves 1, bytes 7, block seconds 48, decode 4

a source that fails before it hands over fails the attempt
  decode_error r#1 WorkerUnavailable D1 died -> cancel r#2; decode r#3 D2 from P/3 behind 10..13
   -> prefill r#3 P for D2/3 behind 10..13
  tokens_from r#2 4 99

a source that is lost after it has handed over fails nothing
  hands_over r#1 4
  lost D1                  -> peers P left D1
  tokens_from r#2 4 14..29 -> deliver r 4: 14..29
  ends r#2                 -> finish r length, migrated, 20 tokens, moves 1

after the failure of the target the source samples on
  decode_error r#2 TransferFailed the hand-off failed -> resume r#1 D1/2
  tokens_from r#1 4 14..29 -> deliver r 4: 14..29
  tokens_from r#2 4 99
  ends r#1                 -> finish r length, disaggregated, 20 tokens
  counts                   -> queued 0; in flight 0; deadlines 0; drain failed 1

the router ends the call of a lost target before it resumes the source
  lost D2 -> peers P left D2; cancel r#2; resume r#1 D1/2

a source that cannot begin ends the call of the target
  cannot_begin r#2         -> cancel r#2; resume r#1 D1/2
  cannot_begin r#2
  tokens_from r#1 4 14..29 -> deliver r 4: 14..29
  ends r#1                 -> finish r length, disaggregated, 20 tokens

the source may return before the first token of the target
  ends r#1 handoff
  load D1                  -> D1 0 s, 0 sequences, 64 blocks
  tokens_from r#2 4 14..29 -> deliver r 4: 14..29
  ends r#2                 -> finish r length, migrated, 20 tokens, moves 1

a sequence that moved to a call which the router has ended is tried again
  decode_error r#2 TransferFailed the hand-off failed -> resume r#1 D1/2
  ends r#1 handoff -> decode r#3 D2 behind 10..13

the end of the request ends both calls
  stopped r -> cancel r#2; cancel r#1; finish r stop, disaggregated, 4 tokens
  tokens_from r#2 4 99

a source that cannot begin after the target has taken over changes nothing
  tokens_from r#2 4 14 -> deliver r 4: 14
  cannot_begin r#2
  cannot_begin r#1
  lost D1              -> peers P left D1

a target that returns before its tokens arrive has taken over
  ends r#2 num_tokens=16
  tokens_from r#2 4 14..29 -> deliver r 4: 14..29; cancel r#1; finish r length, migrated, 20 tokens, moves 1

a target that says where its part begins has taken over
  hands_over r#2 4
  decode_error r#2 TransferFailed bad -> cancel r#1; decode r#3 D2 from P/3 behind 10..13
                                      -> prefill r#3 P for D2/3 behind 10..13

a move that fails is no fault of the worker that computed the prompt
  hands_over r#1 4
  decode_error r#1 WorkerUnavailable D1 died
  decode_error r#2 TransferFailed the hand-off failed -> decode r#3 D2 from P/3 behind 10..13
   -> prefill r#3 P for D2/3 behind 10..13
""",
    ASKED,
)

test_the_choice_of_a_target = transcripts(
    """
a request stays without a worker that takes moves, or if its own one takes none
  reports D2
  asks r#1
  reports D2 draining takes_moves=1
  asks r#1
  counts -> queued 0; in flight 1; deadlines 1; drain no_room 2
  reports D2 takes_moves=1
  reports D1 draining
  asks r#1

a sequence that could stay moves only where a tenth of the pool stays free
  # 28 tokens, of which the last one needs no slot: 7 blocks, and 6.4 of the pool's 64.
  reports D2 takes_moves=1 free=13
  asks r#1 room
  reports D2 takes_moves=1 free=14
  asks r#1 room -> decode r#2 D2 from D1/2 behind 10..13 moves; move r#1 D1 to r#2 D2/2 12 tokens

a request moves at most twice for lack of room and still leaves a worker that drains
  reports D1 takes_moves=1
  asks r#1 room            -> decode r#2 D2 from D1/2 behind 10..13 moves; move r#1 D1 to r#2 D2/2 12 tokens
  hands_over r#1 4
  tokens_from r#2 4 14     -> deliver r 4: 14
  ends r#1 handoff
  asks r#2 room            -> decode r#3 D1 from D2/3 behind 10..14 moves; move r#2 D2 to r#3 D1/3 13 tokens
  hands_over r#2 5
  tokens_from r#3 5 15     -> deliver r 5: 15
  asks r#3 room
  asks r#3                 -> decode r#4 D2 from D1/4 behind 10..15 moves; move r#3 D1 to r#4 D2/4 14 tokens
  counts                   -> queued 0; in flight 1; deadlines 1; room moved 2; room no_room 1
  tokens_from r#4 6 16..29 -> deliver r 6: 16..29
  ends r#4                 -> cancel r#2; cancel r#3; finish r length, migrated, 20 tokens, moves 3

the room of a target is counted before it reports
  reports D2 draining
  reports D1
  arrives s max_tokens=20 -> decode s#1 D1 from P/2; prefill s#1 P for D1/2
  prefilled s#1 10        -> deliver s 0: 10
  tokens_from s#1 1 11    -> deliver s 1: 11
  reports D1 draining takes_moves=1
  reports D2 takes_moves=1 free=10
  asks r#1                -> decode r#2 D2 from D1/3 behind 10..13 moves; move r#1 D1 to r#2 D2/3 12 tokens
  # D2 has 3 blocks left.
  asks s#1

a request with one token to come stays
  tokens_from r#1 4 14..28 -> deliver r 4: 14..28
  asks r#1

a full target is not asked before its next report
  asks r#1                        -> decode r#2 D2 from D1/2 behind 10..13 moves; move r#1 D1 to r#2 D2/2 12 tokens
  decode_error r#2 QueueFull full -> resume r#1 D1/2
  asks r#1
  reports D2 takes_moves=1
  asks r#1                        -> decode r#3 D2 from D1/3 behind 10..13 moves; move r#1 D1 to r#3 D2/3 12 tokens

a target that failed otherwise is avoided
  enter D3 -> peers D3 owner P; peers P reader D3
  reports D3 takes_moves=1
  asks r#1 -> decode r#2 D2 from D1/2 behind 10..13 moves; move r#1 D1 to r#2 D2/2 12 tokens
  decode_error r#2 TransferFailed the hand-off failed -> resume r#1 D1/2
  reports D2 takes_moves=1
  asks r#1 -> decode r#3 D3 from D1/3 behind 10..13 moves; move r#1 D1 to r#3 D3/3 12 tokens
""",
    MOVING,
)

test_a_move_with_log_probabilities = transcripts(
    """
log-probabilities come from the source even after the move
  fleet P D1 D2
  reports D2 draining
  arrives r max_tokens=20 num_logprobs=0 -> decode r#1 D1 from P/1; prefill r#1 P for D1/1
  prefilled r#1 10 logprob=-1            -> deliver r 0: 10 logprobs
  tokens_from r#1 1 11..13 logprob=-1    -> deliver r 1: 11..13 logprobs
  reports D2 takes_moves=1
  reports D1 draining takes_moves=1
  asks r#1                               -> decode r#2 D2 from D1/2 behind 10..13 moves
                                         -> move r#1 D1 to r#2 D2/2 12 tokens
  # The target repeats a token, without its log-probability.
  tokens_from r#2 4 14
  hands_over r#2 5
  tokens_from r#1 4 14 99 logprob=-1     -> deliver r 4: 14 logprobs
  tokens_from r#2 5 15 logprob=-1        -> deliver r 5: 15 logprobs
"""
)
