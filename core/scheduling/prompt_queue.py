"""The prompts of a scheduler: its sequences with more than one token to compute, waiting or running, in their order.

Work is in seconds, priced by a `StepCost`. A waiting prompt has no cost for a prefix that was cached when it was added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from core.cost.step_cost import PRIOR, StepCost
from core.scheduling.prompt_order import PromptOrder
from core.scheduling.sequence import Sequence
from core.scheduling.sequence_blocks import SequenceBlocks

PRICE_CHANGE = 1.1  # a smaller change of the cost does not reprice the prompts


class PromptQueue:
    def __init__(self, blocks: SequenceBlocks) -> None:
        self._blocks = blocks
        self._order = PromptOrder()
        self._sequences: dict[str, Sequence] = {}
        self._num_cached: dict[str, int] = {}  # tokens with a cached prefix, of prompts without blocks
        self._cost = PRIOR

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._sequences

    def add(self, sequence: Sequence, *, is_back: bool = False) -> None:
        """`is_back`: the sequence was served before, so its due point is earlier than that of a new prompt."""
        name, request = sequence.sequence_id, sequence.request
        self._sequences[name] = sequence
        self._note_cached(sequence)
        self._order.add(name, request.priority, request.tenant, self._work_left(sequence), is_back=is_back)

    def update(self, sequence: Sequence) -> None:
        """The planned tokens of a prompt have changed, and no step computes the difference."""
        if sequence in self:
            self._note_cached(sequence)
            self._order.resize(sequence.sequence_id, self._work_left(sequence))
        else:
            self.add(sequence, is_back=True)

    def take(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """The step that is being planned computes the tokens [start, start + num_tokens), which are planned now."""
        work = self._cost.prompt_seconds(num_tokens, start)
        self._order.serve(sequence.sequence_id, work, self._work_left(sequence))

    def discard(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self._order.discard(sequence.sequence_id)
            self._num_cached.pop(sequence.sequence_id, None)

    def first(self) -> Sequence | None:
        name = self._order.first()
        return None if name is None else self._sequences[name]

    def first_of(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """The first one in the order. Sequences that are no prompts are left out."""
        name = self._order.first_of(s.sequence_id for s in sequences if s in self)
        return None if name is None else self._sequences[name]

    def left(self, sequence: Sequence) -> tuple[int, int]:
        """(number of tokens, position of the first): the part of a prompt that no step computes yet."""
        start = self._num_cached.get(sequence.sequence_id, sequence.num_planned_tokens)
        return sequence.num_tokens - start, start

    def set_cost(self, cost: StepCost) -> None:
        """Price the prompts anew if the prices have changed much."""
        known = self._cost
        if _differ(cost.token_s, known.token_s) or _differ(cost.pair_s, known.pair_s):
            self._cost = cost
            self._order.reprice({name: self._work_left(sequence) for name, sequence in self._sequences.items()})

    def _work_left(self, sequence: Sequence) -> float:
        return self._cost.prompt_seconds(*self.left(sequence))

    def _note_cached(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self._num_cached.pop(sequence.sequence_id, None)
        else:
            self._num_cached[sequence.sequence_id] = self._blocks.num_cached_tokens(sequence)

    def check(self, prompts: Iterable[Sequence]) -> None:
        """The queue has exactly `prompts`, and the order has all of them."""
        assert self._sequences == {sequence.sequence_id: sequence for sequence in prompts}
        self._order.check()
        assert len(self._order) == len(self._sequences)
        for name, sequence in self._sequences.items():
            assert name in self._order
            assert (name in self._num_cached) == (not sequence.block_table)
            assert math.isclose(self._order.work_left(name), self._work_left(sequence), abs_tol=1e-9)
        assert self._num_cached.keys() <= self._sequences.keys()


def _differ(price: float, known: float) -> bool:
    low, high = sorted((price, known))
    return high > low * PRICE_CHANGE
