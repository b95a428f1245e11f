"""The prefill worker: prompts in, offers and one first token out."""

from tests.support.worker_words import transcripts

SETUP = """
  prefill
"""

# The reader of `a` has no target blocks. The reader of `b` has, but `b` lacks blocks to be computed.
BLOCKED = """
  prefill blocks=5
  arrive a 16                 -> first step a 0+8; connect peer
  step                        -> step a 8+8; digests 2
  step                        -> digests 2; done a 0: 16
  arrive b 16 first=30 ticket=2
  want 2 0..3                 -> ready 2:
  run
"""

test_offers = transcripts(
    """
each chunk offers its full blocks and the last chunk also the first token
  arrive a 18                 -> first step a 0+8; connect peer
  want 1 0..4                 -> ready 1:
  step                        -> step a 8+8; digests 2; ready 1: 0 1
  step                        -> step a 16+2; digests 2; ready 1: 2 3
  step                        -> digests 1; ready 1: 4 last 18; done a 0: 18  # the last block is half full

the answer has the first token, its times and the blocks up to it
  arrive a 14                 -> first step a 0+8; connect peer
  later 2
  step                        -> step a 8+6; digests 2
  later 3
  step                        -> digests 2; done a 0: 14, block seconds 16, prefill 5

a preempted prompt offers each block once
  prefill blocks=6
  arrive x 8 first=30 ticket=2 -> first step x 0+8; connect peer
  run                         -> digests 2; done x 0: 8
  arrive a 20                 -> first step a 0+8
  want 1 0..4                 -> ready 1:
  # the last block is missing, because the reader of x keeps two
  run                         -> digests 2; ready 1: 0 1; digests 2; ready 1: 2 3
  preempt a
  blocks                      -> leased 6
  release 2                   -> first step a 16+4  # the leased blocks are not used as cached prefix
  step                        -> digests 1; ready 1: 4 last 20; done a 0: 20
""",
    SETUP,
)

test_ends = transcripts(
    """
a first token at the limit does not abort the offer: an abort could overtake the answer
  arrive a 6 max=1            -> first step a 0+6; connect peer
  want 1 0 1                  -> ready 1:
  step a=9                    -> digests 2; ready 1: 0 1 last 9; done a 0: 9, length
  release 1 cancelled
  blocks

a call cancelled during a step keeps its blocks until the step ends
  arrive a 16                 -> first step a 0+8; connect peer
  want 1 0..3                 -> ready 1:
  cancel a                    -> abort 1 prefill_failed; fail a RequestCancelled: the router cancelled the call
  blocks                      -> held 2
  arrive a 16 ticket=2        -> refused InvalidRequest: request_id: a is being served already
  step
  blocks
  idle                        -> yes
  arrive a 16 ticket=3        -> first step a 0+8

an offer that is withdrawn frees its blocks, and one that is read waits for its reader
  prefill blocks=8
  arrive a 14                 -> first step a 0+8; connect peer
  run                         -> digests 2; digests 2; done a 0: 14
  arrive b 14 first=30 ticket=2 -> first step b 0+8
  want 2 0..3                 -> ready 2:
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 14; done b 0: 14
  withdraw 1                  -> abort 1 cancelled
  withdraw 2                  -> abort 2 cancelled
  withdraw 2
  blocks                      -> leased 4
  release 2 cancelled
  withdraw 2
  blocks

a reader that lacks blocks keeps its lease
  arrive a 14                 -> first step a 0+8; connect peer
  want 1 0..3                 -> ready 1:
  run                         -> digests 2; ready 1: 0 1; digests 2; ready 1: 2 3 last 14; done a 0: 14
  wait 11
  beat 1 4 unplaced=4         -> heartbeat answered 1
  wait 11
  blocks                      -> leased 4

an offer that is withdrawn before its prompt is computed gets no block
  arrive a 14                 -> first step a 0+8; connect peer
  withdraw 1                  -> abort 1 cancelled
  run                         -> done a 0: 14
  blocks

an offer that follows its own withdrawal is refused
  withdraw 1
  arrive a 14                 -> refused TransferFailed: transfer 00000000 was offered before

cancelling an ended call does nothing
  arrive a 6                  -> first step a 0+6; connect peer
  step                        -> digests 2; done a 0: 6
  cancel a
  cancel unknown

the deadline ends a call in the queue and in a step
  arrive a 16 timeout=3       -> first step a 0+8; connect peer
  arrive b 16 first=30 ticket=2 timeout=3
  wait 3.1                    -> abort 1 deadline (not read in time); abort 2 deadline (not read in time)
                              -> fail a DeadlineExceeded: the deadline passed during prefill
                              -> fail b DeadlineExceeded: the deadline passed during prefill
  step
  blocks

a failed step ends only its own calls
  prefill max_running=1
  arrive a 6                  -> first step a 0+6; connect peer
  arrive b 6 first=30 ticket=2
  fail_step                   -> step b 0+6; abort 1 prefill_failed; fail a TandemError: the step failed
  step                        -> digests 2; done b 0: 6

a prompt without memory ends alone and its chunk is not offered
  prefill max_batched_tokens=16
  arrive short 4              -> first step short 0+4; connect peer
  arrive long 12 first=30 ticket=2
  want 1 0                    -> ready 1:
  want 2 0..2                 -> ready 2:
  step no_memory=long         -> digests 1; ready 1: 0 last 4; abort 2 prefill_failed
                              -> fail long OutOfDeviceMemory: no memory for long; done short 0: 4
  release 1
  release 2 prefill_failed
  blocks
  idle                        -> yes

a chunk without memory is not offered
  arrive a 16                 -> first step a 0+8; connect peer
  want 1 0..3                 -> ready 1:
  step no_memory=a            -> abort 1 prefill_failed; fail a OutOfDeviceMemory: no memory for a
  release 1 prefill_failed
  blocks

the first token is computed even if the reader gives up
  arrive a 16                 -> first step a 0+8; connect peer
  want 1 0..3                 -> ready 1:
  step                        -> step a 8+8; digests 2; ready 1: 0 1
  release 1 cancelled
  step                        -> done a 0: 16
  blocks

a refused call leaves no state
  prefill blocks=4 max_batched_tokens=4 max_running=1 max_waiting=1
  arrive large 17             -> refused InvalidRequest: max_tokens: 18 tokens need more than the pool's 4 KV blocks
  arrive adapted 8 adapter=red
      -> refused InvalidRequest: model: the engine of this worker has no adapters, workers with `--engine vllm` do
  arrive a 8                  -> first step a 0+4; connect peer
  arrive a 8 ticket=2         -> refused InvalidRequest: request_id: a is being served already
  arrive b 4                  -> refused TransferFailed: transfer 00000000 was offered before
  arrive c 4 ticket=3
  arrive d 4 ticket=4         -> refused QueueFull: 1 sequences wait already (max_waiting)
  load                        -> serving; waiting 1

a draining worker finishes its calls and refuses new ones
  arrive a 6                  -> first step a 0+6; connect peer
  drain
  load                        -> draining
  arrive b 6 ticket=2         -> refused WorkerDrains: this prefill worker drains
  want 1 0 1                  -> ready 1:
  idle                        -> no
  step                        -> digests 2; ready 1: 0 1 last 6; done a 0: 6
  idle                        -> no
  release 1
  idle                        -> yes
""",
    SETUP,
)

test_deadlocks = transcripts(
    """
an offer without a want is withdrawn for a prompt with a waiting reader
  wait 1.1                    -> abort 1 overloaded; first step b 0+8
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 16
                              -> done b 0: 16, block seconds 0.2, queue 1, prefill 0.1

an offer whose reader lacks blocks is withdrawn
  want 1 0..3                 -> ready 1: 0..3 last 16
  beat 1 4 unplaced=3         -> heartbeat answered 1
  wait 1.1                    -> abort 1 overloaded
  release 1 overloaded        -> first step b 0+8
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 16; done b 0: 16, queue 1.1

an offer whose reader has its blocks is not withdrawn
  wait 0.5
  want 1 0..3                 -> ready 1: 0..3 last 16
  beat 1 4 unplaced=3         -> heartbeat answered 1
  beat 1 4                    -> heartbeat answered 1
  wait 5
  release 1                   -> first step b 0+8
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 16; done b 0: 16, queue 5.5

an offer of highest rank is not withdrawn
  wait 0.5
  want 1 0..3                 -> ready 1: 0..3 last 16
  beat 2 4 unplaced=1         -> heartbeat answered 2
  wait 5
  release 1                   -> first step b 0+8
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 16; done b 0: 16, queue 5.5

the unfinished prompt of highest rank is not withdrawn although its reader lacks blocks
  prefill blocks=6
  arrive x 8 first=60 ticket=3 -> first step x 0+8; connect peer
  want 3 0 1                  -> ready 3:
  step                        -> digests 2; ready 3: 0 1 last 8; done x 0: 8
  arrive a 20 ticket=1        -> first step a 0+8
  want 1 0..4                 -> ready 1:
  run                         -> digests 2; ready 1: 0 1; digests 2; ready 1: 2 3
  beat 1 4 unplaced=1         -> heartbeat answered 1
  wait 5
  release 3                   -> first step a 16+4

no offer is withdrawn while a step runs
  prefill
  arrive a 8 ticket=1         -> first step a 0+8; connect peer
  step                        -> digests 2; done a 0: 8
  arrive b 16 first=30 ticket=2 -> first step b 0+8
  want 2 0..3                 -> ready 2:
  wait 5
  step                        -> step b 8+8; digests 2; ready 2: 0 1

each stall has its own time limit
  wait 0.5
  release 1                   -> first step b 0+8
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3 last 16; done b 0: 16, queue 0.5
  release 2
  wait 5
  arrive c 16 first=60 ticket=3 -> first step c 0+8
  run                         -> digests 2; digests 2; done c 0: 16
  arrive d 16 first=90 ticket=4
  want 4 0..3                 -> ready 4:
  run
  wait 0.9
  wait 0.2                    -> abort 3 overloaded; first step d 0+8

no offer is withdrawn while no reader waits for a prompt
  prefill blocks=5
  arrive a 16                 -> first step a 0+8; connect peer
  run                         -> digests 2; digests 2; done a 0: 16
  arrive b 16 first=30 ticket=2
  run
  wait 5

if every offer is wanted the unfinished prompt of lowest rank is withdrawn
  prefill blocks=6
  arrive x 8 first=60 ticket=3 -> first step x 0+8; connect peer
  want 3 0 1                  -> ready 3:
  step                        -> digests 2; ready 3: 0 1 last 8; done x 0: 8
  arrive low 20 first=30 ticket=2 -> first step low 0+8
  want 2 0..4                 -> ready 2:
  run                         -> digests 2; ready 2: 0 1; digests 2; ready 2: 2 3
  preempt low
  arrive high 16 priority=-1 ticket=1
  want 1 0..3                 -> ready 1:
  release 3                   -> first step high 0+8
  run                         -> digests 2; ready 1: 0 1
  wait 1.1                    -> abort 2 overloaded
  release 2 overloaded        -> first step high 8+8
  run                         -> digests 2; ready 1: 2 3 last 16; done high 0: 16, block seconds 2.2, prefill 1.1
""",
    BLOCKED,
)
