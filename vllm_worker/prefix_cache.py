"""The prefix cache of vLLM in Tandem's hashes, from vLLM's block events.

vLLM hashes blocks in a way of its own, and tells the tokens of each block that it stores. So each stored block gets
the sequence hash of core/block_hash.py, which routers look up. Several of vLLM's blocks can have the same content: a
hash is reported once when the first of them is stored, and removed with the last.

Event batches are numbered. After a gap nothing is known for sure: every hash is taken back, and blocks count again once
their whole chain has been stored anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from core.block_hash import chain_hash, local_hash, pack_token_ids, root_hash
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored

VllmHash = int | bytes


class PrefixCache:
    """`block_size` tokens in each block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[VllmHash, int] = {}  # of vLLM's blocks -> sequence hash
        self._counts: Counter[int] = Counter()  # of blocks, by sequence hash
        self._next_number: int | None = None
        self.num_gaps = 0

    @property
    def sequence_hashes(self) -> tuple[int, ...]:
        return tuple(self._counts)

    def take(self, number: int, events: Iterable[Any]) -> list[BlockEvent]:
        """The changes by the batch `number` of `events`: BlockStored, BlockRemoved and AllBlocksCleared of vLLM."""
        changes: list[BlockEvent] = []
        if self._next_number is not None and number != self._next_number:
            self.num_gaps += 1
            changes += self._clear()
        self._next_number = number + 1
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                changes += self._store(event)
            elif kind == "BlockRemoved":
                changes += self._remove(event.block_hashes)
            elif kind == "AllBlocksCleared":
                changes += self._clear()
        return changes

    def _store(self, event: Any) -> list[BlockEvent]:
        if event.block_size != self._block_size:
            return []
        if event.parent_block_hash is None:
            adapter = event.lora_name or ""
            parent = root_hash(_salt_of(event.extra_keys, adapter), adapter)
        elif (parent := self._hashes.get(event.parent_block_hash)) is None:
            return []  # stored before a gap
        changes: list[BlockEvent] = []
        packed, block_bytes = pack_token_ids(event.token_ids), 4 * self._block_size
        for place, vllm_hash in enumerate(event.block_hashes):
            local = local_hash(packed[place * block_bytes : (place + 1) * block_bytes])
            parent = local if parent is None else chain_hash(parent, local)
            if vllm_hash not in self._hashes:
                self._hashes[vllm_hash] = parent
                self._counts[parent] += 1
                if self._counts[parent] == 1:
                    changes.append(BlockStored(parent))
        return changes

    def _remove(self, vllm_hashes: Iterable[VllmHash]) -> list[BlockEvent]:
        changes: list[BlockEvent] = []
        for vllm_hash in vllm_hashes:
            sequence_hash = self._hashes.pop(vllm_hash, None)
            if sequence_hash is None:
                continue
            self._counts[sequence_hash] -= 1
            if not self._counts[sequence_hash]:
                del self._counts[sequence_hash]
                changes.append(BlockRemoved(sequence_hash))
        return changes

    def _clear(self) -> list[BlockEvent]:
        removed: list[BlockEvent] = [BlockRemoved(sequence_hash) for sequence_hash in self._counts]
        self._hashes.clear()
        self._counts.clear()
        return removed


def _salt_of(extra_keys: Any, adapter: str) -> str:
    """The cache salt of a first block: its only extra key behind the adapter."""
    first = extra_keys[0] if extra_keys else None
    keys = (first or ())[bool(adapter) :]
    return str(keys[0]) if keys else ""
