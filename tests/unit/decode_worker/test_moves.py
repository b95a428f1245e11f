"""A running sequence leaves a decode worker, and arrives at one. The peer of the worker is the other side."""

from tests.support.worker_words import transcripts

# A sequence with a prompt of 10 tokens runs: it has 13 tokens, of which 12 are computed.
RUNNING = """
  decode blocks=32
  arrive a 10 max=40          -> first step a 0+8
  run 4                       -> tokens a 0: 10..12; step a 12+1
"""

COPYING = (
    RUNNING
    + """
  move a 7 11                 -> connect peer; digests 3
  want 7 0..7                 -> ready 7: 0..2
"""
)

HANDED_OVER = (
    COPYING
    + """
  beat 7 3 verified=3         -> heartbeat answered 7
  step                        -> tokens a 3: 13; digests 1; ready 7: 3 last 11..13; handed over a 4
"""
)

test_the_start = transcripts(
    """
a step that is planned ahead ends before the sequence goes
  decode blocks=32 ahead=1
  arrive a 10 max=40          -> first step a 0+8
  run 4                       -> tokens a 0: 10..12; step a 12+1; step a 13+1
  wait 0.001
  move a 7 11                 -> connect peer; digests 3
  want 7 0..7                 -> ready 7: 0..2
  beat 7 3 verified=3         -> heartbeat answered 7
  step                        -> tokens a 3: 13
  step                        -> tokens a 4: 14; digests 1; ready 7: 3 last 11..14; handed over a 5

a sequence pauses where the wanted blocks end
  move a 7 11                 -> connect peer; digests 3
  want 7 0..3                 -> ready 7: 0..2
  run                         -> tokens a 3: 13..16; digests 1; ready 7: 3; ready 7: last 11..16; handed over a 7

a sequence that has outgrown the wanted blocks stays
  run 5                       -> tokens a 3: 13..17; step a 17+1
  move a 7 11                 -> connect peer; digests 4
  want 7 0..2                 -> ready 7: 0..2
  step                        -> step a 18+1; tokens a 8: 18
                              -> abort 7 overloaded (the sequence has outgrown the wanted blocks)
  release 7 overloaded
  step                        -> step a 19+1; tokens a 9: 19

a reader without room in time loses the move
  move a 7 11                 -> connect peer; digests 3
  wait 4.9
  wait 0.2                    -> abort 7 overloaded (no room in time)
  step                        -> step a 13+1; tokens a 3: 13

a moving sequence is not preempted, because its leased blocks would not become free
  decode blocks=6
  arrive a 10 max=10          -> first step a 0+8
  run 4                       -> tokens a 0: 10..12; step a 12+1
  move a 7 11                 -> connect peer; digests 3
  want 7 0..4                 -> ready 7: 0..2
  arrive b 8 max=4 priority=-1 first=40
  run                         -> tokens a 3: 13..19; tokens b 0: 8; digests 1; ready 7: 3; done a length
                              -> abort 7 cancelled (the call of the owner has ended)
  load                        -> serving
  release 7 cancelled         -> first step b 8+1
  run                         -> tokens b 1: 9..11; done b length

a sequence that cannot move is refused
  move a 7 14                 -> refused TransferFailed: a cannot move now  # the reader knows more than there is
  move a 7 11                 -> connect peer; digests 3
  move a 8 11                 -> refused TransferFailed: a cannot move now
  move unknown 8 11           -> refused TransferFailed: unknown cannot move now
""",
    RUNNING,
)

test_the_copy = transcripts(
    """
a sequence whose reader has caught up pauses and goes with its last block and all tokens
  beat 7 3 verified=3         -> heartbeat answered 7  # a step is in flight
  step                        -> tokens a 3: 13; digests 1; ready 7: 3 last 11..13; handed over a 4
  later 1
  release 7                   -> done a handoff, moved bytes 128, block seconds 4, move 1
  blocks
  idle                        -> yes

a reader that has not verified all announced blocks pauses nothing
  beat 7 2 verified=2         -> heartbeat answered 7
  step                        -> step a 13+1; tokens a 3: 13

a reader that has found room has no limit but its lease
  wait 5.1
  step                        -> step a 13+1; tokens a 3: 13

a sequence whose reader is lost during its last step runs on
  beat 7 3 verified=3         -> heartbeat answered 7
  peer_lost
  step                        -> step a 13+1; tokens a 3: 13
  step                        -> step a 14+1; tokens a 4: 14

resume while blocks are copied ends the move alone
  resume a 8  # another move
  resume a 7                  -> abort 7 cancelled (the router ended the move)
  step                        -> step a 13+1; tokens a 3: 13
  resume a 7
  step                        -> step a 14+1; tokens a 4: 14

a sequence that ends takes the move with it
  step a=63                   -> tokens a 3: 63; done a stop; abort 7 cancelled (the call of the owner has ended)
""",
    COPYING,
)

test_handed_over = transcripts(
    """
a release with a reason lets the sequence run on in its blocks
  release 7 read_failed       -> first step a 13+1
  run                         -> tokens a 4: 14..49; done a length

after resume the sequence leaves the block that the reader may still read
  resume a 7                  -> first step a 12+2; abort 7 cancelled (the router ended the move)
  run                         -> tokens a 4: 14..49; done a length, recomputed 1
  blocks                      -> leased 4
  wait 12
  blocks

a paused sequence without a sign of its reader ends within a lease
  wait 11.9
  wait 0.2                    -> fail a TransferFailed: the lease of the move ended without a sign of its reader
  blocks

a reader that keeps its lease alive has no longer
  wait 5
  beat 7 4 verified=4         -> heartbeat answered 7
  wait 5
  beat 7 4 verified=4         -> heartbeat answered 7
  wait 2.1
      -> fail a TransferFailed: the reader of the move has neither released the blocks nor failed in time
  blocks                      -> leased 4
""",
    HANDED_OVER,
)

test_a_drain = transcripts(
    """
a worker that drains returns what it has not begun and asks for the rest
  arrive long 30 max=4 first=100
  arrive waits 8 max=4 first=200
  arrive pulled 8 max=4 first=300 ticket=3 -> connect peer; want 3: 0 1  # its prompt is being computed elsewhere
  drain                       -> fail long WorkerDrains: this decode worker drains, and has not begun with the request
      -> fail waits WorkerDrains: this decode worker drains, and has not begun with the request
                              -> ask to move a (drain)
  arrive late 8               -> refused WorkerDrains: this decode worker drains

a worker asks again when no router answers and for few at a time
  decode blocks=64 max_running=8
  arrive r1 1 max=40          -> first step r1 0+1
  arrive r2 1 max=40 first=10
  arrive r3 1 max=40 first=20
  arrive r4 1 max=40 first=30
  arrive r5 1 max=40 first=40
  run 4                       -> tokens r1 0: 1..4; tokens r2 0: 1..3; tokens r3 0: 1..3; tokens r4 0: 1..3
                              -> tokens r5 0: 1..3; step r1 4+1, r2 3+1, r3 3+1, r4 3+1, r5 3+1
  drain                       -> ask to move r1 r2 r3 r4 (drain)
  tick
  wait 0.4
  wait 0.2                    -> ask to move r5 r1 r2 r3 (drain)
  move r4 7 4                 -> connect peer
  wait 0.5                    -> ask to move r1 r2 r3 (drain)
""",
    RUNNING,
)

test_the_target = transcripts(
    """
the target wants blocks to come, tells at once what it has, and takes fewer
  decode blocks=32
  arrive a 10 max=40 known=2 ticket=1 -> connect peer; want 1: 0..12
  ready 1 0..2                -> read 1: 0..2
  load                        -> serving; promised 10
  reads                       -> heartbeat 1: ready 3 verified 3
  ready 1 3 tokens=12,13,14   -> read 1: 3
  reads                       -> first step a 14+1; release 1; tokens a 2: 12, a 3: 13, a 4: 14; handed over a 5
                              -> path peer fine
  run                         -> tokens a 5: 15..49; done a length, pulled 4
  blocks

a target takes no cached block with the newest token
  decode blocks=32
  arrive before 12 max=1      -> first step before 0+8
  run                         -> tokens before 0: 12; done before length
  arrive a 10 max=40 known=2 ticket=1 -> connect peer; want 1: 2..12

a target takes no more tokens than the client asked for
  decode blocks=32
  arrive a 9 max=3 known=1 ticket=1 -> connect peer; want 1: 0..2
  ready 1 0..2 tokens=12,13,14
          -> release 1 read_failed
          -> fail a TransferFailed: the KV hand-off failed: read_failed (the owner sent 3 tokens, at most 2)
  blocks

a target that knows all tokens computes the newest one
  decode blocks=32
  arrive a 10 max=40 known=2 ticket=1 -> connect peer; want 1: 0..12
  ready 1 0..2 last=1         -> read 1: 0..2
  reads                       -> first step a 11+1; release 1; handed over a 2; path peer fine
"""
)
