"""Hand-offs take blocks when these are announced, in rank order, and never wait for each other in a circle.

`targets` shows how many of its blocks each hand-off has taken.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import RouterConfig
from core.lifecycle import ServiceRole
from core.machine import Tick
from router.routing.policy import SecondsPolicy
from router.routing.question import RoutingQuestion
from router.routing.worker_record import WorkerRecord
from tests.support.worker_words import WorkerReplay, transcripts

DECODE = """
  decode
"""

# Hand-offs 1 and 2 of 6 blocks each, the first with 2 announced.
HALF_PULLED = """
  decode blocks=9
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 ticket=2 -> want 2: 0..5
  ready 1 0 1                 -> read 1: 0 1
"""

# As before, but the second one ranks higher, and neither gets its last blocks.
STALLED = """
  decode blocks=9
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 priority=-1 ticket=2 -> want 2: 0..5
  ready 1 0..4                -> read 1: 0..4
  ready 2 0..4                -> read 2: 0..3
  reads
"""

# Local requests of 3 blocks each on 16 blocks, which end in different steps.
BUSY = """
  decode
  arrive local1 8 first=100   -> first step local1 0+8
  step                        -> step local1 8+1; tokens local1 0: 8
  arrive local2 8 first=200
  step                        -> step local1 9+1, local2 0+7; tokens local1 1: 9
  arrive local3 8 first=300
  step                        -> step local1 10+1, local2 7+1, local3 0+6; tokens local1 2: 10
  arrive local4 8 first=400
  step                        -> step local2 8+1, local3 6+2, local4 0+5; tokens local1 3: 11, local2 0: 8
                              -> done local1 length
"""

test_beside_others = transcripts(
    """
a hand-off that does not fit beside older local prompts waits for their blocks
  decode blocks=16
  arrive local1 40 max=2      -> first step local1 0+8
  arrive local2 20 max=2 first=101
  arrive pulled 24 max=2 first=1000 ticket=1 -> connect peer
  run                         -> tokens local2 0: 20 21; tokens local1 0: 40 41; want 1: 0..5; done local2 length
                              -> done local1 length
  ready 1 0..5 tokens=20      -> read 1: 0..5
  reads                       -> first step pulled 24+1; release 1; tokens pulled 0: 20; path peer fine
  run                         -> tokens pulled 1: 25; done pulled length, pulled 6

a hand-off does not wait for a later prompt
  decode blocks=6 max_running=1
  arrive runs 16 max=1        -> first step runs 0+8
  arrive a 14 first=30 ticket=1 -> connect peer
  arrive later 8 first=50
  step                        -> step runs 8+8
  step                        -> step later 0+8; tokens runs 0: 16; done runs length; want 1: 0..3
""",
    DECODE,
)

test_half_pulled = transcripts(
    """
a pull leaves the blocks that a half-pulled prompt before it still needs
  ready 2 0..4                -> read 2: 0 1
  targets                     -> a 2; b 2  # a needs 4 of the other 7, and one to run
  ready 1 2..5 tokens=20      -> read 1: 2..5
  targets                     -> a 6; b 2
  ready 2 5 tokens=30
  reads                       -> first step a 24+1; release 1; tokens a 0: 20; path peer fine
  run                         -> tokens a 1: 25; done a length, pulled 6; read 2: 2..4; read 2: 5
  reads                       -> first step b 24+1; release 2; tokens b 0: 30
  run                         -> tokens b 1: 25; done b length, pulled 6

a pull that gets its last blocks passes a half-pulled prompt
  decode blocks=8
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 ticket=2 -> want 2: 0..5
  ready 1 0 1                 -> read 1: 0 1
  arrive short 16 max=2 first=300 ticket=3 -> want 3: 0..3
  ready 3 0..2                -> read 3: 0
  targets                     -> a 2; b 0; short 1
  ready 3 3 tokens=40         -> read 3: 1 2; read 3: 3
  targets                     -> a 2; b 0; short 4
  ready 1 2..5 tokens=20      -> read 1: 2 3
  targets                     -> a 4; b 0; short 4
  reads                       -> release 3; tokens short 0: 40; path peer fine
  run
  wait 1                      -> read 1: 4 5
  run
  reads                       -> first step a 24+1; release 1; tokens a 0: 20
  run                         -> tokens a 1: 25; tokens short 1: 17
                              -> done a length, pulled 6, block seconds 4, transfer 1
                              -> done short length, pulled 4, recomputed 12, preempted 1, block seconds 4, decode 1

a pull passes if its last blocks are all there are
  decode blocks=8
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 ticket=2 -> want 2: 0..5
  ready 1 0 1                 -> read 1: 0 1
  ready 2 0..4                -> read 2: 0
  ready 2 5 tokens=30         -> read 2: 1..4; read 2: 5

a hand-off waits behind one of higher rank that lacks blocks
  decode blocks=7
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 ticket=2 -> want 2: 0..5
  ready 1 0 1                 -> read 1: 0 1
  ready 2 0..5 tokens=30
  arrive c 4 max=1 first=200 ticket=3

a pull that ends lets the next one take its blocks
  ready 2 0..4                -> read 2: 0 1
  cancel a                    -> fail a RequestCancelled: the router cancelled the call; read 2: 2..4
  targets                     -> a 2; b 5  # b needs what a will not need any more, and a still reads
  reads                       -> release 1 cancelled
  targets                     -> b 5

a running sequence takes the blocks of a lower rank at once
  decode blocks=4
  arrive runs 4 max=10        -> first step runs 0+4  # 4 blocks at its end
  arrive low 8 first=100 priority=1 ticket=1 -> connect peer; want 1: 0 1
  ready 1 0                   -> read 1: 0
  reads
  run                         -> tokens runs 0: 4..13
      -> fail low TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
                              -> release 1 overloaded; done runs length
  blocks

a running sequence takes the next victim only if the blocks of the last one do not suffice
  decode blocks=4
  arrive runs 4 max=10        -> first step runs 0+4
  arrive low 8 first=100 priority=1 ticket=1 -> connect peer; want 1: 0 1
  arrive lower 8 first=200 priority=2 ticket=2 -> want 2: 0 1
  ready 2 0                   -> read 2: 0
  ready 1 0                   -> read 1: 0
  run                         -> tokens runs 0: 4..8
      -> fail lower TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
  blocks                      -> held 2; incoming 2

blocks that a read still writes to are waited for, with one victim at a time
  decode blocks=4
  arrive runs 4 max=10        -> first step runs 0+4
  arrive low 8 first=100 priority=1 ticket=1 -> connect peer; want 1: 0 1
  arrive lower 4 first=200 priority=2 ticket=2 -> want 2: 0
  ready 1 0                   -> read 1: 0
  run                         -> tokens runs 0: 4..12
      -> fail low TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
  blocks                      -> held 3; incoming 1
  read_fails                  -> first step runs 12+1; release 1 overloaded
  run                         -> tokens runs 9: 13; done runs length
""",
    HALF_PULLED,
)

test_stalls = transcripts(
    """
a pull of higher rank takes the blocks of a half-pulled prompt after a stall
  targets                     -> a 5; b 4
  wait 0.9
  wait 0.2
      -> fail a TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
                              -> release 1 overloaded; read 2: 4
  targets                     -> b 5
  ready 2 5 tokens=30         -> read 2: 5
  reads                       -> first step b 24+1; release 2; tokens b 0: 30; path peer fine
  run                         -> tokens b 1: 25; done b length, pulled 6, block seconds 4.5, transfer 1.1
  blocks

a stall takes one victim, and begins anew when blocks come
  decode blocks=10
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 priority=-1 ticket=2 -> want 2: 0..5
  arrive c 8 max=2 first=200 priority=1 ticket=3 -> want 3: 0 1
  ready 3 0                   -> read 3: 0
  ready 1 0..4                -> read 1: 0..4
  ready 2 0..5                -> read 2: 0..3
  wait 1.1
      -> fail c TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
  wait 0.5
  reads                       -> release 3 overloaded; read 2: 4
  wait 0.9                    -> heartbeat 1: ready 5 verified 5, 2: ready 6 unplaced 1 verified 4
  wait 0.2
      -> fail a TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
                              -> release 1 overloaded; read 2: 5

there is no stall while reads will free blocks
  decode blocks=10
  arrive a 24 max=2 ticket=1  -> connect peer; want 1: 0..5
  arrive b 24 max=2 first=100 priority=-1 ticket=2 -> want 2: 0..5
  arrive c 4 max=2 first=200 priority=-2 ticket=3 -> want 3: 0
  ready 3 0 tokens=40         -> read 3: 0
  ready 1 0..4                -> read 1: 0..4
  ready 2 0..4                -> read 2: 0..2
  wait 1.9

a stall that has ended does not shorten the next one
  wait 0.5
  cancel b                    -> fail b RequestCancelled: the router cancelled the call; release 2 cancelled
  arrive d 24 max=2 first=200 priority=-1 ticket=3
  wait 0.9
  wait 0.2
      -> fail a TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
                              -> release 1 overloaded; want 3: 0..5

events that move nothing do not prolong a stall
  wait 0.3
  arrive later1 4 first=1000 priority=5
  wait 0.3
  arrive later2 4 first=1010 priority=5
  wait 0.3
  arrive later3 4 first=1020 priority=5
  wait 0.15                   -> first step later1 0+4, later2 0+4
      -> fail a TransferFailed: the KV hand-off lost its blocks to a sequence that ranks higher
                              -> release 1 overloaded; read 2: 4
""",
    STALLED,
)

test_starvation = transcripts(
    """
a hand-off of nearly all blocks waits for none of a lower priority that comes later
  arrive pulled 59 first=5000 priority=-10 ticket=1 -> connect peer
  arrive local5 8 first=500
  arrive local6 8 first=600
  run                         -> tokens local2 1: 9..11; tokens local3 0: 8..11; tokens local4 0: 8..11
                              -> tokens local5 0: 8..11; tokens local6 0: 8..11; done local2 length
                              -> done local3 length; done local4 length; want 1: 0..14; ask to move local6 (room)
                              -> done local5 length; done local6 length
  ready 1 0..14 tokens=20     -> read 1: 0..14
  reads                       -> first step pulled 59+1; release 1; tokens pulled 0: 20; path peer fine
  run                         -> tokens pulled 1: 60..62; done pulled length, pulled 15

a waiting hand-off does not hold up local requests of higher priority
  arrive pulled 59 first=5000 ticket=1 -> connect peer
  arrive urgent 8 first=6000 priority=-1
  run                         -> tokens local2 1: 9..11; tokens local3 0: 8..11; tokens urgent 0: 8..11
                              -> tokens local4 0: 8..11; done local2 length; done local3 length; done urgent length
                              -> done local4 length; want 1: 0..14

a preempted sequence waits behind a hand-off of higher rank and finishes
  decode blocks=8
  arrive before 8 max=12 first=100 -> first step before 0+8
  arrive behind 8 max=20 first=200 priority=2
  step                        -> step before 8+1, behind 0+7; tokens before 0: 8
  arrive pulled 24 first=5000 priority=1 ticket=1 -> connect peer
  run 12                      -> tokens before 1: 9..19; tokens behind 0: 8..15; ask to move behind (room)
                              -> done before length; want 1: 0..5; step behind 15+1
  ready 1 0..5 tokens=20      -> read 1: 0..2
  load                        -> serving; promised 3; preemptions 1
  reads
  run                         -> tokens behind 8: 16..20
  wait 1                      -> read 1: 3..5
  reads                       -> first step pulled 24+1; release 1; tokens pulled 0: 20; path peer fine
  run                         -> tokens pulled 1: 25..27; tokens behind 13: 21..27
                              -> done pulled length, pulled 6, block seconds 3, transfer 1
                              -> done behind length, recomputed 18, preempted 2, block seconds 5, decode 1
""",
    BUSY,
)


@pytest.mark.parametrize("num_blocks", [8, 10])
def test_the_router_and_the_worker_agree_whether_a_hand_off_with_cached_blocks_has_room(num_blocks: int) -> None:
    """4 blocks are cached, and the prompt hits them and needs 3 others. A running sequence holds 2 and may need one
    more, so 1 or 3 are free."""
    worker = WorkerReplay(
        f"decode blocks={num_blocks}", "arrive before 16 max=1", "run", "arrive runs 7 max=8 first=200", "step"
    )
    load = replace(worker.machine.load(), num_released_blocks=0)
    record = WorkerRecord("D", ServiceRole.DECODE, worker.me, load, 0.0, "router", 8)
    question = RoutingQuestion(28, [(record.view, 0)], [(record.view, 16)], True, worker.me.layout.block_size)
    (found,) = SecondsPolicy(RouterConfig(local_prefill="never")).candidates(question)
    is_wanted = "  -> want 1: 4..6" in worker.line("arrive again 28 max=1 ticket=1")
    assert is_wanted == (not found.room_wait_s)
    assert is_wanted == (num_blocks == 10)


def test_a_waiting_hand_off_looks_for_blocks_again_only_after_a_change_of_the_pool() -> None:
    hand_off = ("arrive runs 12 max=6 ticket=1", "ready 1 0..2 tokens=20", "reads")
    worker = WorkerReplay("decode blocks=5", *hand_off, "arrive waits 8 first=40 max=2 ticket=2")
    num_changes = worker.pool.num_changes
    for _ in range(3):
        worker.post(Tick())
    assert worker.pool.num_changes == num_changes, "each event holds and drops the cached prefix"
    assert "  -> want 2: 0 1" in worker.line("run")
