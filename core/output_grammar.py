"""The seam between the sampler of an engine and the reader of grammars (text/grammars.py).

What may come next in an output is a function of its grammar and its tokens so far. No other state exists, so a sequence
can move to another worker, be preempted or be resumed at any token. A reader may keep what it has worked out, and may
forget it at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from core.errors import TandemError
from core.step import Proposal, SequenceView


class GrammarRow(NamedTuple):
    """Places where tokens are drawn: behind `num_known` tokens of the sequence's list and the promised token, and
    behind each draft that follows."""

    sequence: SequenceView
    num_known: int
    promised: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


class Masks(NamedTuple):
    """By sequence id. Token i may come next if bit i % 8 of byte i // 8 is set; each mask allows at least one token.

    A row with drafts has a mask for each of its places, up to the first draft that the grammar does not allow.
    """

    allowed: Mapping[str, tuple[bytes, ...]] = MappingProxyType({})
    failed: Mapping[str, TandemError] = MappingProxyType({})  # sequences whose grammar has become too complex


class Grammars(Protocol):
    def begin(self, rows: Sequence[GrammarRow]) -> Callable[[], Masks]:
        """Compute masks on another thread. The returned function waits for them, at most for some milliseconds each."""
        ...

    def propose(self, rows: Sequence[GrammarRow], guess: Callable[[GrammarRow], Proposal]) -> list[Proposal]:
        """For each row, guesses of the tokens behind it: those that its grammar forces, and where it forces none, those
        that `guess` gives for the row with the guesses so far as its drafts, up to the first that the grammar forbids.
        A row that fails has none."""
        ...
