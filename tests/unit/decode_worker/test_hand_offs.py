"""The calls of a decode worker: pulled blocks in, tokens out; local prefill, cancels, deadlines, refusals, drains."""

from tests.support.worker_words import transcripts

SETUP = """
  decode
"""

test_hand_offs = transcripts(
    """
a hand-off takes each block when it is announced and decodes from the second token
  arrive a 6 max=3 ticket=1   -> connect peer; want 1: 0 1
  blocks
  ready 1 0                   -> read 1: 0  # while the prefill worker still computes
  blocks                      -> incoming 1
  ready 1 1 tokens=20         -> read 1: 1
  blocks                      -> incoming 2
  reads                       -> first step a 6+1; release 1; tokens a 0: 20; path peer fine
  blocks                      -> held 2
  run                         -> tokens a 1: 7 8; done a length, pulled 2
  blocks
  idle                        -> yes

a pulled first token at the limit ends the request
  arrive a 6 max=1 ticket=1   -> connect peer; want 1: 0 1
  ready 1 0 1 tokens=20       -> read 1: 0 1
  reads                       -> release 1; tokens a 0: 20; done a length, pulled 2; path peer fine
  blocks

a pull leaves the next block of each running sequence free
  decode blocks=5
  arrive pulls 12 max=4 first=30 ticket=1 -> connect peer; want 1: 0..2
  arrive runs 7 max=4         -> first step runs 0+7  # 2 blocks now, a third block soon
  ready 1 0..2 tokens=20      -> read 1: 0 1
  blocks                      -> held 2; incoming 2
  run                         -> tokens runs 0: 7..10; done runs length; read 1: 2
  reads                       -> first step pulls 12+1; release 1; tokens pulls 0: 20; path peer fine
  run                         -> tokens pulls 1: 13..15; done pulls length, pulled 3
  load                        -> serving

a full queue does not refuse a pulled sequence
  decode max_running=1 max_waiting=1
  arrive runs 4 max=8         -> first step runs 0+4
  arrive pulls 4 max=4 first=30 ticket=1 -> connect peer; want 1: 0
  arrive waits 4 max=4 first=50
  ready 1 0 tokens=20         -> read 1: 0
  reads                       -> release 1; tokens pulls 0: 20; path peer fine
  run                         -> tokens runs 0: 4..11; tokens pulls 1: 5..7; tokens waits 0: 4..7; done runs length
                              -> done pulls length, pulled 1; done waits length

with a partial prefix hit only the missing blocks are pulled, and with a full one only the first token
  arrive before 9 max=2 ticket=9 -> connect peer; want 9: 0..2
  ready 9 0..2 tokens=20      -> read 9: 0..2
  reads                       -> first step before 9+1; release 9; tokens before 0: 20; path peer fine
  run                         -> tokens before 1: 10; done before length, pulled 3
  arrive a 14 max=2 ticket=1  -> want 1: 2 3
  blocks                      -> held 2
  ready 1 2 3 tokens=20       -> read 1: 2 3
  blocks                      -> held 2; incoming 2
  reads                       -> first step a 14+1; release 1; tokens a 0: 20
  run                         -> tokens a 1: 15; done a length, pulled 2, cached 8, skipped 2
  arrive b 8 max=2 ticket=2   -> want 2:
  ready 2 tokens=33           -> first step b 8+1; release 2; tokens b 0: 33
  run                         -> tokens b 1: 9; done b length, cached 8, skipped 2

a lost owner fails its hand-offs and targets stay reserved until their reads end
  arrive a 6 ticket=1         -> connect peer; want 1: 0 1
  arrive b 6 first=30 ticket=2 -> want 2: 0 1
  ready 1 0                   -> read 1: 0
  peer_lost                   -> fail a TransferFailed: the KV hand-off failed: peer_lost (gone)
                              -> fail b TransferFailed: the KV hand-off failed: peer_lost (gone)
  blocks                      -> incoming 1
  read_fails peer_lost
  blocks

a hand-off without a first token fails and releases its blocks
  arrive before 9 max=1       -> first step before 0+8
  run                         -> tokens before 0: 9; done before length
  arrive a 14 ticket=1        -> connect peer; want 1: 2 3
  ready 1 2 3 last=1          -> read 1: 2 3
  reads                       -> release 1; fail a TransferFailed: the hand-off delivered no first token
                              -> path peer fine
  blocks

a hand-off with more than the first token fails
  arrive a 8 ticket=1         -> connect peer; want 1: 0 1
  ready 1 0 1 tokens=20,21
          -> release 1 read_failed
          -> fail a TransferFailed: the KV hand-off failed: read_failed (the owner sent 2 tokens, at most 1)
  blocks

block-seconds count from the reservation of each block
  arrive a 8 max=2 ticket=1   -> connect peer; want 1: 0 1
  later 5
  ready 1 0                   -> read 1: 0
  later 2
  ready 1 1 tokens=20         -> read 1: 1
  later 1
  # the step needs a third block
  reads                       -> first step a 8+1; release 1; tokens a 0: 20; path peer fine
  later 4
  run                         -> tokens a 1: 9; done a length, pulled 2, block seconds 16, transfer 8, decode 4
""",
    SETUP,
)

test_calls = transcripts(
    """
a call without a source computes its prompt
  arrive a 10 max=3           -> first step a 0+8
  later 1
  step                        -> step a 8+2
  later 2
  step                        -> step a 10+1; tokens a 0: 10
  later 4
  run                         -> tokens a 1: 11 12; done a length, block seconds 20, prefill 3, decode 4
  idle                        -> yes

a call cancelled while it waits for blocks does not hold up the next
  decode blocks=4
  arrive a 12 ticket=1        -> connect peer; want 1: 0..2
  ready 1 0..2 tokens=20      -> read 1: 0..2
  arrive b 12 first=30 ticket=2
  arrive c 4 first=50 ticket=3
  cancel b                    -> fail b RequestCancelled: the router cancelled the call; release 2 cancelled
                              -> want 3: 0

a call cancelled during its reads keeps the target blocks until they end
  arrive a 8 ticket=1         -> connect peer; want 1: 0 1
  ready 1 0 1 tokens=20       -> read 1: 0 1
  claims                      -> a transfer
  cancel a                    -> fail a RequestCancelled: the router cancelled the call
  claims                      -> a ending
  blocks                      -> incoming 2
  idle                        -> no
  reads                       -> release 1 cancelled
  claims
  blocks
  idle                        -> yes

the deadline ends a call that waits for room
  decode blocks=4
  arrive before 16 max=1 first=30 ticket=9 -> connect peer; want 9: 0..3
  ready 9 0..3 tokens=20      -> read 9: 0..3
  arrive a 8 ticket=1 timeout=3
  wait 2.9                    -> heartbeat 9: ready 4, 1: ready 0
  wait 0.2                    -> fail a DeadlineExceeded: the deadline passed on the decode worker in stage queue
                              -> release 1 deadline

the deadline ends a call in decode
  arrive a 8 ticket=1 timeout=3 -> connect peer; want 1: 0 1
  ready 1 0 1 tokens=20       -> read 1: 0 1
  reads                       -> first step a 8+1; release 1; tokens a 0: 20; path peer fine
  wait 3.1                    -> fail a DeadlineExceeded: the deadline passed on the decode worker in stage decode
  step
  blocks

a refused call leaves no state
  decode blocks=4 pulls=1
  arrive large 14 max=4 ticket=5
      -> refused InvalidRequest: max_tokens: 18 tokens need more than the pool's 4 KV blocks
  arrive a 4 ticket=6 dtype=bfloat16
      -> refused LayoutMismatch: KV layouts differ in dtype: 'float32' here, 'bfloat16' there
  arrive a 4 adapter=red
      -> refused InvalidRequest: model: the engine of this worker has no adapters, workers with `--engine vllm` do
  arrive a 13 ticket=1        -> connect peer; want 1: 0..3
  ready 1 0..3 tokens=20      -> read 1: 0..3
  arrive a 4 ticket=7         -> refused InvalidRequest: request_id: a is being served already
  arrive b 4 ticket=1         -> refused TransferFailed: transfer 00000000 was pulled before
  arrive c 4 ticket=2
  arrive d 4 ticket=3         -> refused QueueFull: 1 hand-offs already wait for room (max_pulls_waiting)
  load                        -> serving; pulls 1; promised 1

hand-offs beyond a lowered limit wait on
  decode blocks=4 pulls=8
  arrive a 13 ticket=1        -> connect peer; want 1: 0..3
  ready 1 0..3 tokens=20      -> read 1: 0..3
  arrive b 4 ticket=2
  arrive c 4 ticket=3
  limits pulls=1 max_running=1
  arrive late 4 ticket=4      -> refused QueueFull: 1 hand-offs already wait for room (max_pulls_waiting)
  load                        -> serving; pulls 2; promised 2
  reads                       -> first step a 13+1; release 1; tokens a 0: 20; path peer fine
  arrive d 4
  step                        -> step a 14+1; tokens a 1: 14

a draining worker finishes its calls and refuses new ones
  arrive a 6 max=2 ticket=1   -> connect peer; want 1: 0 1
  drain
  load                        -> draining; promised 2
  arrive b 4                  -> refused WorkerDrains: this decode worker drains
  ready 1 0 1 tokens=20       -> read 1: 0 1
  reads                       -> first step a 6+1; release 1; tokens a 0: 20; path peer fine
  run                         -> tokens a 1: 7; done a length, pulled 2
  idle                        -> yes

an ended call leaves no deadline and its id may be used again
  arrive a 4 max=2            -> first step a 0+4
  idle                        -> no
  run                         -> tokens a 0: 4 5; done a length
  deadline
  idle                        -> yes
  arrive a 4 max=2            -> first step a 0+4
""",
    SETUP,
)
