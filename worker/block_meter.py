"""KV blocks times the seconds for which sequences hold them: what a sequence cost the pool, for its receipt.

    blocks   4 |      +-------+
             2 |------+       |           area = 2 x 3 s + 4 x 4 s
               +------------------> s
               0      3       7

A shared block counts for each of its holders. The meter changes a count when a step is planned, so blocks count from
the plan of the step that they are for.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.scheduling.sequence import Sequence
from core.step import ScheduledChunk


class BlockMeter:
    """`now` never falls. A sequence that the meter does not know holds no block."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, float, float]] = {}  # sequence id -> (blocks, since, block-seconds before)

    def note(self, sequence_id: str, num_blocks: int, now: float) -> None:
        """The sequence holds `num_blocks` from `now` on."""
        known, since, area = self._held.get(sequence_id, (0, now, 0.0))
        if known != num_blocks:
            self._held[sequence_id] = (num_blocks, now, area + known * (now - since))

    def note_planned(self, chunks: Iterable[ScheduledChunk], now: float) -> None:
        held = self._held
        for chunk in chunks:
            view = chunk.sequence
            found = held.get(view.sequence_id)
            if found is None or found[0] != len(view.block_table):
                self.note(view.sequence_id, len(view.block_table), now)

    def note_waiting(self, waiting: Iterable[Sequence], now: float) -> None:
        """Call it after a preemption: preempted sequences wait again, and have no block any more."""
        for sequence in waiting:
            if sequence.sequence_id in self._held:
                self.note(sequence.sequence_id, len(sequence.block_table), now)

    def read(self, sequence_id: str, now: float) -> float:
        """Block-seconds up to `now`."""
        num_blocks, since, area = self._held.get(sequence_id, (0, now, 0.0))
        return area + num_blocks * (now - since)

    def forget(self, sequence_id: str) -> None:
        self._held.pop(sequence_id, None)

    def __len__(self) -> int:
        return len(self._held)
