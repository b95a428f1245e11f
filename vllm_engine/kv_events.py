"""The prefix cache of a worker as the block events of `vllm.grpc.engine`: a snapshot, then numbered batches.

A subscriber gets the snapshot first, unless it names the number of the newest batch. The chunks of a snapshot carry the
numbers that end at the newest batch, so the batches follow without a gap. A subscriber that reads too slowly loses its
stream rather than a batch, and subscribes again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from smg_grpc_proto.generated import common_pb2

from core.block_hash import unpack_token_ids
from core.scheduling.block_pool import BlockEvent, BlockPool, BlockRemoved, PrefixBlock

MAX_BATCHES_BEHIND = 64
BLOCKS_PER_CHUNK = 1024  # under 4 MiB, the default limit of a gRPC message, for blocks of 256 tokens
FIRST_NUMBER = 1 << 20  # of the batches; lower numbers are for the chunks of a snapshot


class KvEvents:
    """Use it on one event loop. `publish_changes()` hands the changes so far to `on_block_events`."""

    def __init__(self, pool: BlockPool, block_size: int, publish_changes: Callable[[], object]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._publish_changes = publish_changes
        self._number = FIRST_NUMBER
        self._salts: dict[int, str] = {}  # of the blocks in the cache with a salt, by sequence hash
        self._subscribers: set[asyncio.Queue[common_pb2.KvEventBatch | None]] = set()
        self._closed = False

    def on_block_events(self, events: Sequence[BlockEvent]) -> None:
        """Changes of the prefix cache, in order. A block that has left again is only reported as removed."""
        if not events:
            return
        self._number += 1
        batch = self._batch(self._number, self._encode(events))
        for queue in list(self._subscribers):
            if queue.qsize() >= MAX_BATCHES_BEHIND:
                self._cut_off(queue)
            else:
                queue.put_nowait(batch)

    def close(self) -> None:
        """End every stream and refuse new ones."""
        self._closed = True
        for queue in list(self._subscribers):
            self._cut_off(queue)

    def _cut_off(self, queue: asyncio.Queue[common_pb2.KvEventBatch | None]) -> None:
        self._subscribers.discard(queue)
        queue.put_nowait(None)

    async def subscribe(self, start: int) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Ends if the subscriber reads too slowly, or with `close`."""
        if self._closed:
            return
        self._publish_changes()  # the snapshot contains all changes so far, and each is reported once
        queue: asyncio.Queue[common_pb2.KvEventBatch | None] = asyncio.Queue(MAX_BATCHES_BEHIND + 1)
        snapshot = [] if start == self._number else self._snapshot()
        self._subscribers.add(queue)
        try:
            for chunk in snapshot:
                yield chunk
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            self._subscribers.discard(queue)

    def _snapshot(self) -> list[common_pb2.KvEventBatch]:
        blocks = self._reachable()
        starts = range(0, max(len(blocks), 1), BLOCKS_PER_CHUNK)
        chunks = []
        for index, start in enumerate(starts):
            events = list(self._stored(blocks[start : start + BLOCKS_PER_CHUNK]))
            if index == 0:
                events.insert(0, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
            batch = self._batch(self._number - len(starts) + 1 + index, events)
            batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = index, len(starts), len(blocks)
            chunks.append(batch)
        return chunks

    def _reachable(self) -> list[PrefixBlock]:
        """The blocks of the cache, parents first, without those whose parent has left."""
        known: set[int] = set()
        blocks = []
        for block in self._pool.cached_prefixes():
            if isinstance(block.parent, str) or (block.parent and block.parent.sequence_hash in known):
                known.add(block.sequence_hash)
                blocks.append(block)
        return blocks

    def _encode(self, events: Sequence[BlockEvent]) -> list[common_pb2.KvCacheEvent]:
        encoded: list[common_pb2.KvCacheEvent] = []
        stored: list[PrefixBlock] = []
        for event in events:
            if isinstance(event, BlockRemoved):
                encoded += self._stored(stored)
                stored.clear()
                self._salts.pop(event.sequence_hash, None)
                removed = common_pb2.KvBlocksRemoved(block_hashes=[_signed(event.sequence_hash)])
                encoded.append(common_pb2.KvCacheEvent(removed=removed))
            else:
                block = self._pool.find_prefix(event.sequence_hash)
                if block is not None and block.parent is not None:
                    stored.append(block)
        return [*encoded, *self._stored(stored)]

    def _stored(self, blocks: Iterable[PrefixBlock]) -> list[common_pb2.KvCacheEvent]:
        """One event for each run of blocks in which each block is the parent of the next."""
        events: list[common_pb2.KvCacheEvent] = []
        last: PrefixBlock | None = None
        for block in blocks:
            if last is None or block.parent is not last:
                events.append(common_pb2.KvCacheEvent(stored=self._begin_run(block)))
            salt = self._salt_of(block)
            if salt:
                self._salts[block.sequence_hash] = salt
            events[-1].stored.blocks.add(
                block_hash=_signed(block.sequence_hash),
                token_ids=unpack_token_ids(block.token_bytes),
                block_size=self._block_size,
            )
            last = block
        return events

    def _begin_run(self, first: PrefixBlock) -> common_pb2.KvBlocksStored:
        run = common_pb2.KvBlocksStored()
        if isinstance(first.parent, PrefixBlock):
            run.parent_block_hash = _signed(first.parent.sequence_hash)
        salt = self._salt_of(first)
        if salt:
            run.cache_salt = salt
        return run

    def _salt_of(self, block: PrefixBlock) -> str:
        if isinstance(block.parent, str):
            return block.parent
        return "" if block.parent is None else self._salts.get(block.parent.sequence_hash, "")

    @staticmethod
    def _batch(number: int, events: Iterable[common_pb2.KvCacheEvent]) -> common_pb2.KvEventBatch:
        return common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), events=events)


def _signed(sequence_hash: int) -> int:
    """The hash as the int64 of the wire."""
    return sequence_hash - (1 << 64) if sequence_hash >> 63 else sequence_hash
