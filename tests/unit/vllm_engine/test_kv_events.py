"""The block events of a worker: a subscriber that applies them knows the prefix cache."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the extra smg: pip install smg-grpc-proto")

from core.block_hash import FullBlock, extend_full_blocks
from core.scheduling.block_pool import BlockPool, PrefixBlock
from vllm_engine.kv_events import BLOCKS_PER_CHUNK, MAX_BATCHES_BEHIND, KvEvents

BLOCK_SIZE = 4


def cache(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Compute and release a sequence. Returns its hashes."""
    full: list[FullBlock] = []
    extend_full_blocks(full, token_ids, BLOCK_SIZE)
    blocks = pool.allocate(len(full))
    assert blocks is not None
    parent: PrefixBlock | str | None = salt
    for block, content in zip(blocks, full, strict=True):
        parent = pool.register(block, content, parent)
    pool.release(blocks)
    return [content.sequence_hash for content in full]


def events_of(pool: BlockPool) -> KvEvents:
    events = KvEvents(pool, BLOCK_SIZE, lambda: events.on_block_events(pool.drain_events()))
    return events


async def test_a_large_cache_comes_in_chunks_whose_numbers_end_where_the_changes_begin() -> None:
    pool = BlockPool(BLOCKS_PER_CHUNK + 10)
    hashes = cache(pool, list(range(BLOCK_SIZE * (BLOCKS_PER_CHUNK + 3))))
    events = events_of(pool)
    stream = events.subscribe(0)
    chunks = [await anext(stream), await anext(stream)]
    assert [(c.snapshot.index, c.snapshot.count, c.snapshot.blocks) for c in chunks] == [
        (0, 2, len(hashes)),
        (1, 2, len(hashes)),
    ]
    stored = [event.stored for chunk in chunks for event in chunk.events if event.HasField("stored")]
    assert sum(len(run.blocks) for run in stored) == len(hashes)
    assert stored[1].parent_block_hash == stored[0].blocks[-1].block_hash
    cache(pool, [9, 9, 9, 9])
    events.on_block_events(pool.drain_events())
    change = await anext(stream)
    assert [c.sequence_number - change.sequence_number for c in chunks] == [-2, -1]
    await stream.aclose()


async def test_a_subscriber_that_names_the_newest_batch_gets_no_snapshot() -> None:
    pool = BlockPool(8)
    events = events_of(pool)
    first = events.subscribe(0)
    number = (await anext(first)).sequence_number
    await first.aclose()
    again = events.subscribe(number)
    change = asyncio.ensure_future(anext(again))
    await asyncio.sleep(0)  # lets the stream subscribe
    cache(pool, [1, 2, 3, 4])
    events.on_block_events(pool.drain_events())
    assert not (await asyncio.wait_for(change, 5)).HasField("snapshot")
    await again.aclose()


async def test_blocks_of_a_salt_are_marked_and_evicted_ones_removed() -> None:
    pool = BlockPool(2)
    events = events_of(pool)
    stream = events.subscribe(0)
    await anext(stream)
    hashes = cache(pool, list(range(8)), salt="tenant")
    events.on_block_events(pool.drain_events())
    (stored,) = [event.stored for event in (await anext(stream)).events]
    assert (stored.cache_salt, len(stored.blocks)) == ("tenant", 2)
    cache(pool, list(range(50, 58)))
    events.on_block_events(pool.drain_events())
    batch = await anext(stream)
    removed = [value for event in batch.events for value in event.removed.block_hashes]
    assert {value % (1 << 64) for value in removed} == set(hashes)
    assert [len(event.stored.blocks) for event in batch.events if event.HasField("stored")] == [2]
    await stream.aclose()


async def test_a_subscriber_that_does_not_read_loses_its_stream() -> None:
    pool = BlockPool(4)
    events = events_of(pool)
    stream = events.subscribe(0)
    await anext(stream)
    for number in range(MAX_BATCHES_BEHIND + 2):
        cache(pool, [number] * 4)
        events.on_block_events(pool.drain_events())
    assert len([batch async for batch in stream]) == MAX_BATCHES_BEHIND
