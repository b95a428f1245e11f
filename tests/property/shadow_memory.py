"""A model of a pool's KV memory. Each slot records the prefix that its KV was computed from."""

from __future__ import annotations

from core.scheduling.sequence import Sequence

Content = int  # hash of a cache salt and all tokens up to a position


def contents(sequence: Sequence, start: int, end: int, drafts: tuple[int, ...] = ()) -> list[Content]:
    """The contents that `sequence` needs in the slots of positions [start, end), with `drafts` behind its tokens."""
    salt, tokens = sequence.request.cache_salt, (*sequence.token_ids, *(drafts or ("dropped",)))
    return [hash((salt, tokens[: position + 1])) for position in range(start, end)]


class ShadowMemory:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]

    def slots(self, block_table: list[int], start: int, end: int) -> list[Content | None]:
        size = self.block_size
        return [self.blocks[block_table[p // size]][p % size] for p in range(start, end)]

    def write(self, sequence: Sequence, start: int, end: int, drafts: tuple[int, ...] = ()) -> None:
        """Write positions [start, end), computed by `sequence` or by a peer for it, and those of drafts behind them.

        The token of the last position may be missing: a step samples it for the step ahead, and drops it at an abort.
        """
        for position, content in enumerate(contents(sequence, start, end + len(drafts), drafts), start):
            self.blocks[sequence.block_table[position // self.block_size]][position % self.block_size] = content
