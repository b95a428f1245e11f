"""The blocks of single sequences: cached prefixes held, tables grown, full blocks registered, everything released."""

from __future__ import annotations

from core.scheduling.block_pool import BlockPool, PrefixBlock
from core.scheduling.sequence import Sequence


class SequenceBlocks:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def hold_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Share the longest cached prefix of at most `max_tokens` tokens. The sequence must hold no block."""
        assert not sequence.block_table
        found = self._find_cached(sequence, max_tokens)
        sequence.block_table += [cached.block for cached in found]
        self.pool.share(sequence.block_table)
        if found:
            sequence.cache_parent = found[-1]
        sequence.num_registered_blocks = len(sequence.block_table)
        sequence.num_computed_tokens = sequence.num_planned_tokens = len(sequence.block_table) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """The tokens that an admission would find in the cache now. The last token is computed in any case."""
        return len(self._find_cached(sequence, sequence.num_tokens - 1)) * self.block_size

    def _find_cached(self, sequence: Sequence, max_tokens: int) -> list[PrefixBlock]:
        blocks = sequence.full_blocks(self.block_size)[: max_tokens // self.block_size]
        return self.pool.match_prefix(blocks, sequence.request.cache_salt)

    def drop(self, sequence: Sequence) -> None:
        """Release every block of `sequence`. Nothing is computed any more."""
        self.pool.release(sequence.block_table)
        sequence.forget_blocks()

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for its first `num_tokens` tokens. Returns False, and changes nothing, if too few."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table += blocks
        return True

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Add every full, computed block of `sequence` to the prefix cache."""
        blocks = sequence.full_blocks(self.block_size)
        num_full = sequence.num_computed_tokens // self.block_size
        for position in range(sequence.num_registered_blocks, num_full):
            sequence.cache_parent = self.pool.register(
                sequence.block_table[position], blocks[position], sequence.cache_parent
            )
        sequence.num_registered_blocks = num_full
