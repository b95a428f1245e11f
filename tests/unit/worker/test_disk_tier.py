"""The tier below the pool, in the machines of both roles: the test is the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.cost.step_cost import work_of
from core.handoff import PrefixSource
from core.kv_layout import KVLayout
from core.scheduling.block_pool import BlockPool, PrefixBlock
from decode_worker.events import DecodeArrived
from prefill_worker.machine import PrefillArrived
from tests.support.driven_worker import LAYOUT, request
from tests.support.transcripts import transcripts_of
from tests.support.worker_words import WorkerReplay
from worker.tier.disk_tier import FIRST_PAUSE_S, LATE_S, MAX_NEWS, MAX_PAUSE_S, PRIOR_BYTES_PER_S, READ_S, DiskTier
from worker.tier.events import (
    BlocksCopied,
    BlocksRead,
    BlocksWritten,
    EraseSlot,
    GiveUpRead,
    ReadBlocks,
    ReadEnd,
    SlotErased,
    WriteBlocks,
)
from worker.tier.names import identity_of
from worker.tier.slot_table import SlotTable

GONE = PrefixBlock(0, 0, b"", None)  # evicted


class TierReplay(WorkerReplay):
    """A computed token takes 1 ms (`core.cost.step_cost.PRIOR`), and the bytes of a block take no time."""

    def begin(self, slots: int = 64, **options: Any) -> None:
        super().begin(**options)
        self.core.tier = DiskTier(self.pool, LAYOUT.block_bytes, identity_of(LAYOUT), SlotTable(slots, {}))

    def step(self, no_memory: str = "", seconds: float | None = None, **tokens: int) -> list[Any]:
        """Takes as long as the worker expects."""
        work = work_of(self.plans[0].chunks)
        return super().step(no_memory, self.core.costs.cost.seconds(work) if seconds is None else seconds, **tokens)

    @property
    def tier(self) -> DiskTier:
        assert self.core.tier is not None
        return self.core.tier

    def seek(self, name: str, tokens: int, peer: int = 0, **options: Any) -> list[Any]:
        """A prompt, of which the peer has `peer` tokens."""
        source = PrefixSource(9, self.peer, peer, 0.5) if peer else None
        salt, priority = str(options.pop("salt", "")), options.pop("priority", 0)
        prompt = replace(request(name, tokens, 1, priority=priority, **options), cache_salt=salt)
        if hasattr(self.machine, "pulls"):
            return self.post(DecodeArrived(prompt, None, self.now + 60, prefix=source))
        return self.post(PrefillArrived(prompt, int(name, 36), self.peer, self.now + 60, prefix=source))

    def keep(self, tokens: int, **options: Any) -> list[str]:
        """Compute a prompt, write its blocks down, and evict all of them from the pool."""
        self.seek("keep", tokens, **options)
        self.run()
        while self.of(WriteBlocks)[-1].writes == self.tier._writes:
            self.copied()
            self.written()
        self.machine.transfers.owner.abort(int("keep", 36), None)  # type: ignore[arg-type]
        return [f"stored {len(self.tier.table)}", *self.evict()]

    def evict(self) -> list[str]:
        blocks = self.pool.allocate(self.pool.num_available)
        assert blocks is not None
        self.pool.release(blocks)
        return []

    def copied(self) -> list[Any]:
        return self.post(BlocksCopied())

    def written(self, *num: int, full: int = 0) -> list[Any]:
        """`num`: blocks before the disk failed, or was full."""
        return self.post(BlocksWritten(num[0] if num else len(self.tier._writes), bool(full)))

    def disk(self, num: int = -1, end: str = "complete", read: int = -1) -> list[Any]:
        """A read ends. `num`: blocks that it has brought."""
        found = next(action for action in self.of(ReadBlocks) if action.read_id == read)
        return self.post(BlocksRead(read, len(found.reads) if num < 0 else num, 0.001, ReadEnd(end)))

    def erased(self) -> list[Any]:
        return self.post(SlotErased(self.of(EraseSlot)[-1].slot))

    def corrupt(self, *blocks: int) -> list[Any]:
        self.pool.invalidate(blocks)
        return self.tick()

    def stored(self) -> list[str]:
        return [f"{len(self.tier.table)}"]

    def failures(self) -> list[str]:
        return [f"{self.tier.counts.num_failures}"]

    def seen(self, action: Any) -> str:
        match action:
            case WriteBlocks(writes):
                return "write " + " ".join(str(write.header.position) for write in writes)
            case ReadBlocks(read_id, reads, limit_s):
                return f"read {read_id}: {len(reads)} within {limit_s:.3g}"
            case EraseSlot():
                return "erase"
            case GiveUpRead(read_id):
                return f"give up {read_id}"
        return super().seen(action)


def transcripts(text: str, setup: str) -> Callable[[str], None]:
    return transcripts_of(TierReplay, text, setup)


test_down = transcripts(
    """
blocks are held until they are copied, and the next write waits for the disk
  seek a 8                      -> first step a 0+8
  run                           -> tokens a 0: 8; done a length; write 0 1
  blocks                        -> held 2
  idle                          -> yes
  copied
  blocks
  seek b 5 first=40             -> first step b 0+5
  run                           -> tokens b 0: 5; done b length
  written                       -> write 0
  stored                        -> 2
  copied
  written
  stored                        -> 3

a write that fails keeps what it has written, and writes pause
  seek a 13                     -> first step a 0+8
  run                           -> tokens a 0: 13; write 0 1; done a length
  copied
  written 1
  stored                        -> 1
  seek b 5 first=40             -> first step b 0+5
  run                           -> tokens b 0: 5; done b length
  wait 9
  wait 2                        -> write 0
  copied
  written
  seek c 5 first=60             -> first step c 0+5
  run                           -> tokens c 0: 5; done c length; write 0
  copied
  written 0
  seek d 5 first=70             -> first step d 0+5
  run                           -> tokens d 0: 5; done d length
  deadline                      -> in 10

on a full disk, new blocks take the slots of others at once, and the file grows again after a pause
  keep 9                        -> stored 2
  seek a 5 first=40             -> first step a 0+5
  run                           -> tokens a 0: 5; done a length; write 0
  copied
  written 0 full=1
  seek b 13 first=50            -> first step b 0+8
  run                           -> tokens b 0: 13; write 0 1; done b length
  copied
  written
  stored                        -> 2
  wait 11
  seek c 13 first=70            -> first step c 0+8
  run                           -> tokens c 0: 13; write 0 1; done c length
  copied
  written                       -> write 2
  copied
  written
  stored                        -> 5
  seek d 5 first=90             -> first step d 0+5
  run                           -> tokens d 0: 5; done d length; write 0
  copied
  written 0 full=1
  wait 11
  seek e 5 first=100            -> first step e 0+5
  run                           -> tokens e 0: 5; done e length; write 0
  copied
  written
  stored                        -> 6

a full disk that fails to write over a block, too, pauses the writes
  keep 9                        -> stored 2
  seek a 5 first=40             -> first step a 0+5
  run                           -> tokens a 0: 5; done a length; write 0
  copied
  written 0 full=1
  seek b 5 first=50             -> first step b 0+5
  run                           -> tokens b 0: 5; done b length; write 0
  copied
  written 0 full=1
  seek c 5 first=60             -> first step c 0+5
  run                           -> tokens c 0: 5; done c length
  deadline                      -> in 10

a pause that ends with nothing to write leaves no deadline behind
  seek a 9                      -> first step a 0+8
  run                           -> tokens a 0: 9; write 0 1; done a length
  copied
  written 1
  deadline
  wait 11
  deadline

a pause that ends without blocks to spare leaves no deadline behind
  seek a 9                      -> first step a 0+8
  run                           -> tokens a 0: 9; write 0 1; done a length
  seek b 9 first=40             -> first step b 0+8
  run                           -> tokens b 0: 9; done b length
  copied
  written 0
  deadline                      -> in 10
  seek c 60 first=70            -> first step c 0+8
  wait 11
  deadline                      -> in 49

a corrupt block is forgotten during a pause, and no write waits behind a hung erasure
  seek a 9                      -> first step a 0+8
  run                           -> tokens a 0: 9; write 0 1; done a length
  copied
  written
  seek b 5 first=40             -> first step b 0+5
  run                           -> tokens b 0: 5; done b length; write 0
  copied
  written 0
  corrupt 0                     -> erase
  stored                        -> 1
  seek a2 10                    -> first step a2 0+8
  run                           -> tokens a2 0: 10; done a2 length
  wait 11
  erased                        -> write 0
  copied
  written
  stored                        -> 2

a block that turns out corrupt while it is written is not found
  seek a 9                      -> first step a 0+8
  run                           -> tokens a 0: 9; write 0 1; done a length
  corrupt 1
  copied
  written                       -> erase
  stored                        -> 1
""",
    setup="  decode\n",
)

test_up = transcripts(
    """
a prompt finds on disk what the pool has lost
  keep 9                        -> stored 2
  seek a 10                     -> read -1: 2 within 0.00801
  blocks                        -> incoming 2
  deadline                      -> in 0.0580064
  load                          -> serving; waiting 1
  disk                          -> first step a 8+2
  blocks                        -> held 3
  run                           -> tokens a 0: 10; done a length, cached 8
  blocks

what the pool has is not read
  keep 13                       -> stored 3
  seek a 5                      -> read -1: 1 within 0.004
  disk                          -> first step a 4+1
  run                           -> tokens a 0: 5; done a length, cached 4
  seek b 14                     -> read -2: 2 within 0.00801
  disk read=-2                  -> first step b 12+2
  run                           -> tokens b 0: 14; done b length, cached 12

a disk that is late brings a part
  keep 13                       -> stored 3
  seek a 14                     -> read -1: 3 within 0.012
  disk 2 end=late               -> first step a 8+6
  run                           -> tokens a 0: 14; done a length, cached 8
  failures                      -> 1

a slot that has another block is a miss, and the block is written again
  keep 13                       -> stored 3
  seek a 14                     -> read -1: 3 within 0.012
  disk 1 end=lost               -> first step a 4+8
  run                           -> tokens a 0: 14; write 1; done a length, cached 4
  stored                        -> 2
  copied
  written
  stored                        -> 3

a disk that hangs is given up, keeps no block, and gets no other read
  keep 9                        -> stored 2
  seek a 10                     -> read -1: 2 within 0.00801
  wait 0.05
  wait 0.05                     -> give up -1; first step a 0+8
  blocks                        -> held 2
  run                           -> tokens a 0: 10
                                -> done a length, block seconds 0.0839872, queue 0.0580064, prefill 0.0419936
  idle                          -> yes
  evict
  wait 1000
  seek b 10                     -> first step b 0+8
  run                           -> tokens b 0: 10; done b length
  evict
  disk 0 end=late
  failures                      -> 1
  seek c 10                     -> read -2: 2 within 0.00801

a cancelled call frees its targets at once
  keep 9                        -> stored 2
  seek a 10                     -> read -1: 2 within 0.00801
  cancel a                      -> give up -1; fail a RequestCancelled: the router cancelled the call
  blocks
  disk
  failures                      -> 0

another prompt with the same blocks waits for the same read
  keep 9                        -> stored 2
  seek a 10                     -> read -1: 2 within 0.00801
  seek b 14
  disk                          -> first step a 8+2, b 8+6
  run                           -> tokens a 0: 10; tokens b 0: 14; done a length, cached 8
                                -> done b length, cached 8; write 2

the disk goes before a peer that has no more
  keep 9                        -> stored 2
  seek a 14 peer=8              -> read -1: 2 within 0.00801
  disk                          -> first step a 8+6
  run                           -> tokens a 0: 14; done a length, cached 8; write 2
  evict
  seek b 14 peer=12             -> connect peer; want 9: 0..2

another salt finds nothing
  keep 9 salt=7                 -> stored 2
  seek a 10 salt=8              -> first step a 0+8
  step                          -> step a 8+2; write 0 1
  seek b 10 salt=7              -> read -1: 2 within 0.00801
""",
    setup="  decode\n",
)

test_roles_and_room = transcripts(
    """
a prefill worker writes down what it offers
  prefill
  seek a 9                      -> first step a 0+8; connect peer
  run                           -> digests 2; write 0 1; digests 1; done a 0: 9, length
  blocks                        -> held 2; leased 1
  want 10 0 1                   -> ready 10: 0 1 last 9

without blocks to spare, nothing is read
  decode blocks=6
  keep 9                        -> stored 2
  arrive a 16 first=70          -> first step a 0+8
  seek b 10
""",
    setup="",
)


def test_a_read_begins_only_where_it_is_quicker_than_computing() -> None:
    layout = KVLayout("m", "float32", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
    tier = DiskTier(BlockPool(64), layout.block_bytes, identity_of(layout), SlotTable(8, {}))
    price_s = READ_S + 10 * layout.block_bytes / PRIOR_BYTES_PER_S
    assert tier.limit_s(10, price_s * 0.99, 50.0) is None
    assert tier.limit_s(10, price_s * 1.01, 50.0) == pytest.approx(price_s * 1.01)
    assert tier.limit_s(10, 3 * price_s + LATE_S, 50.0) == pytest.approx(2 * price_s + LATE_S)
    assert tier.limit_s(10, 60.0, 50.0) == pytest.approx(price_s + (60.0 - price_s) / 2)


def test_the_price_is_that_of_this_disk_behind_the_reads_in_flight() -> None:
    replay = TierReplay("decode", "keep 9")
    assert replay.tier.price_s(10) == READ_S + 10 * LAYOUT.block_bytes / PRIOR_BYTES_PER_S
    replay.line("seek a 10")
    assert replay.tier.price_s(10) == READ_S + 12 * LAYOUT.block_bytes / PRIOR_BYTES_PER_S
    replay.post(BlocksRead(-1, 2, 2 * LAYOUT.block_bytes / 1e3, ReadEnd.COMPLETE))  # 1,000 bytes per second
    assert replay.tier.counts.num_read == 2
    bytes_per_s = PRIOR_BYTES_PER_S + (1e3 - PRIOR_BYTES_PER_S) / 4
    assert replay.tier.price_s(10) == READ_S + 10 * LAYOUT.block_bytes / bytes_per_s


def slow(num_reads: int) -> TierReplay:
    """Its disk had 10 bytes per second in these reads."""
    replay = TierReplay("decode", "keep 9")
    for _ in range(num_reads):
        replay.line("seek a 10")
        replay.post(BlocksRead(replay.tier._next_read, 2, 2 * LAYOUT.block_bytes / 10, ReadEnd.COMPLETE))
        replay.line("run")
        replay.evict()
    return replay


def test_a_disk_that_was_slow_is_tried_again() -> None:
    replay = slow(30)
    assert replay.tier.limit_s(10, 0.004, replay.now + MAX_PAUSE_S - 1.0) is None
    assert replay.tier.limit_s(10, 0.004, replay.now + MAX_PAUSE_S) is not None
    assert replay.tier.price_s(10) == READ_S + 10 * LAYOUT.block_bytes / PRIOR_BYTES_PER_S


def test_after_the_pause_that_a_failure_brings_a_slow_disk_is_tried() -> None:
    replay = slow(1)
    replay.line("seek a 10")
    replay.line(f"disk 0 end=failed read={replay.tier._next_read}")
    assert replay.tier.price_s(10) == READ_S + 10 * LAYOUT.block_bytes / PRIOR_BYTES_PER_S


def test_a_read_that_was_given_up_pauses_the_next_ones() -> None:
    replay = TierReplay("decode", "keep 9", "seek a 10", "wait 0.1", "disk 0 end=late")
    assert replay.tier.limit_s(1, 60.0, replay.now + FIRST_PAUSE_S - 1.0) is None
    assert replay.tier.limit_s(1, 60.0, replay.now + FIRST_PAUSE_S) is not None


def test_one_event_looks_at_a_bounded_number_of_blocks_and_a_tick_at_once_goes_on() -> None:
    replay = TierReplay("decode")
    replay.tier._news.extend([GONE] * (2 * MAX_NEWS))
    replay.tick()
    assert len(replay.tier._news) == MAX_NEWS
    assert replay.machine.next_deadline() == replay.now
    replay.tick()
    assert replay.machine.next_deadline() is None


def test_a_block_behind_one_that_was_evicted_without_a_name_is_not_written() -> None:
    replay = TierReplay("decode")
    replay.tier._news.append(PrefixBlock(1, 1, b"", GONE))
    assert replay.tick() == []


def test_each_further_failure_in_a_row_doubles_the_pause() -> None:
    replay = TierReplay("decode", "keep 9")
    for pauses in (1, 2, 4, 0, 1):  # 0: a read succeeds
        replay.line("seek a 10")
        end = f"disk 0 end=failed read={replay.tier._next_read}" if pauses else f"disk read={replay.tier._next_read}"
        replay.line(end)
        replay.line("run")
        assert not pauses or replay.tier.limit_s(1, 60.0, replay.now + FIRST_PAUSE_S * pauses - 0.1) is None
        assert replay.tier.limit_s(1, 60.0, replay.now + FIRST_PAUSE_S * pauses) is not None
        replay.evict()
        replay.later(FIRST_PAUSE_S * pauses)


def test_a_disk_that_has_failed_for_weeks_is_still_tried_and_ends_no_worker() -> None:
    replay = TierReplay("decode", "keep 9")
    tier = replay.tier
    for _ in range(2_000):
        tier.read(read_id := tier.new_read_id(), [], [], 1.0, replay.now)
        tier.on_read(BlocksRead(read_id, 0, 0.0, ReadEnd.FAILED), replay.now)
    assert tier.limit_s(1, 60.0, replay.now + MAX_PAUSE_S - 1.0) is None
    assert tier.limit_s(1, 60.0, replay.now + MAX_PAUSE_S) is not None
