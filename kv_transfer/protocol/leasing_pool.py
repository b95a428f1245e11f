"""What the owner and the puller ask of the pool of their blocks.

`BlockPool` (core/scheduling/) is the pool of Tandem's engine, `LentBlocks` (vllm_worker/kv/) stands for that of vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from core.scheduling.block_pool import Column


class LeasingPool(Protocol):
    def lease(self, blocks: Collection[int]) -> None:
        """Let one more peer read these blocks. None of them is used again before its last `unlease`."""
        ...

    def unlease(self, blocks: Sequence[int]) -> None:
        """End one peer's lease of these blocks."""
        ...

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Take corrupt blocks out of the prefix cache. Their sequences and readers keep them."""
        ...

    def num_leases(self, block: int) -> int:
        """The number of peers that may read this block now."""
        ...

    def leases(self) -> dict[int, int]:
        """The number of peers that may read each block, for blocks with at least one."""
        ...

    def column_of(self, block: int) -> Column: ...
