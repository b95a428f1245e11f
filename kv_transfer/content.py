"""What the owner knows of its blocks' bytes: for which the agent keeps a digest, who waits for a check, and what was
computed meanwhile from blocks that may be found spoilt.

A digest stands for the bytes a block was computed with. The pool counts how often a block was handed out to be written
(`BlockPool.content_of`), so a digest of earlier bytes is never mistaken for one of those that are there now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from core.block_pool import BlockPool
from core.handoff import TransferId


class Contents:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[int, int] = {}  # block -> the content whose digest the agent keeps
        self._checks: Counter[TransferId] = Counter()  # under way
        self._computed: dict[TransferId, dict[int, int]] = {}  # block -> content: all of a transfer's sequence

    def keep(self, transfer_id: TransferId, blocks: Iterable[int]) -> tuple[int, ...]:
        """Blocks of a transfer's sequence, computed now or earlier. Returns those whose digest is still to be kept, and
        will be from now on."""
        computed = list(self._now(blocks))
        self._computed.setdefault(transfer_id, {}).update(computed)
        fresh = [(block, content) for block, content in computed if self._kept.get(block) != content]
        self._kept.update(fresh)
        return tuple([block for block, _ in fresh])

    def begin_check(self, transfer_id: TransferId, blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """(block, content) of those that can be checked; where there are none, no check is under way."""
        known = tuple([(block, content) for block, content in self._now(blocks) if self._kept.get(block) == content])
        if known:
            self._checks[transfer_id] += 1
        return known

    def end_check(self, transfer_id: TransferId, spoilt: Iterable[tuple[int, int]]) -> list[int]:
        """The blocks that are spoilt, but for those that hold something else by now."""
        self._checks[transfer_id] -= 1
        if self._checks[transfer_id] <= 0:
            del self._checks[transfer_id]
        return self._current(spoilt)

    def is_checked(self, transfer_id: TransferId) -> bool:
        return transfer_id not in self._checks

    def computed_for(self, transfer_id: TransferId) -> list[int]:
        """All blocks of its sequence that still hold what was computed."""
        return self._current(self._computed.get(transfer_id, {}).items())

    def forget_computed(self, transfer_id: TransferId) -> None:
        """No check of it is under way, and none will be."""
        assert self.is_checked(transfer_id)
        self._computed.pop(transfer_id, None)

    @property
    def followed(self) -> Set[TransferId]:
        """Transfers of which it is known what was computed for them."""
        return self._computed.keys()

    def _current(self, contents: Iterable[tuple[int, int]]) -> list[int]:
        return [block for block, content in contents if self._pool.content_of(block) == content]

    def _now(self, blocks: Iterable[int]) -> Iterable[tuple[int, int]]:
        return ((block, self._pool.content_of(block)) for block in blocks)
