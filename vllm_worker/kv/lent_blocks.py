"""The blocks that vLLM has lent to the transfers: for each, references that keep it from being used again.

    engine's thread     takes a reference for each block that it offers (`BlockPool.touch`), and sends the block
    transfer thread     lend -> lease -> unlease -> freed      of an offer
                             `-> return_spare -----> freed     not wanted, or its offer has ended
    engine's thread     gives back the references of `freed` (`BlockPool.free_blocks`)

Every reference comes back once. vLLM's pool belongs to the engine's thread, so the two threads share only the queues.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from core.scheduling.block_pool import Column


class LentBlocks:
    """A `LeasingPool`. `freed` and `corrupt` are for the engine's thread, all else for the transfer thread."""

    def __init__(self) -> None:
        self.freed: deque[int] = deque()  # blocks of references that are over
        self.corrupt: deque[int] = deque()  # blocks that must leave the prefix cache; their references go on
        self._spare: Counter[int] = Counter()  # lent, and not leased yet
        self._leases: Counter[int] = Counter()
        self._incoming: Counter[int] = Counter()  # targets of pulls

    def lend(self, blocks: Iterable[int]) -> None:
        """The engine has taken a reference for each of these blocks."""
        self._spare.update(blocks)

    def return_spare(self) -> None:
        """Give back what was lent and is not leased."""
        self.freed.extend(self._spare.elements())
        self._spare.clear()

    def lease(self, blocks: Collection[int]) -> None:
        self._spare.subtract(blocks)
        assert min(self._spare.values(), default=0) >= 0, "a block is leased that was not lent"
        self._leases.update(blocks)

    def unlease(self, blocks: Sequence[int]) -> None:
        self._leases.subtract(blocks)
        assert min((self._leases[block] for block in blocks), default=0) >= 0
        self._leases = +self._leases
        self.freed.extend(reversed(blocks))  # as in vLLM, the last block is evicted first

    def invalidate(self, blocks: Iterable[int]) -> None:
        self.corrupt.extend(blocks)

    def num_leases(self, block: int) -> int:
        return self._leases[block]

    def leases(self) -> dict[int, int]:
        return dict(self._leases)

    def begin_incoming(self, blocks: Iterable[int]) -> None:
        """Reads may write into these blocks."""
        self._incoming.update(blocks)

    def end_incoming(self, blocks: Iterable[int]) -> None:
        self._incoming.subtract(blocks)
        self._incoming = +self._incoming

    def column_of(self, block: int) -> Column:
        """INCOMING, LEASED or HELD: vLLM alone knows which of the other blocks are free."""
        if self._incoming[block]:
            return Column.INCOMING
        return Column.LEASED if self._leases[block] else Column.HELD
