"""Guesses of the next tokens of sequences. A wrong guess costs time, never a token.

Texts repeat themselves and their prompts: summaries, answers from documents, code, JSON. `Lookup` looks for the newest
tokens earlier in the same text and proposes what followed them there (Saxena, Prompt Lookup Decoding, 2023). With a
grammar, the two take turns: the tokens that the grammar forces, then what `Lookup` proposes behind those up to the
first token that the grammar forbids, then the tokens that it forces there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from core.output_grammar import GrammarRow, Grammars
from core.scheduling.drafts import MAX_DRAFTS, MAX_MATCH
from core.step import NO_PROPOSAL, NO_PROPOSALS, Proposal, SampledToken, SequenceView, StepPlan
from engine.step_queue import PromisedTokens

MIN_MATCH = 2  # tokens; after one, a fifth of the guesses is right
MAX_COPIES = 16  # the latest ones are compared
RECENT = 4096  # tokens that are searched first: a repetitive text has enough copies there
_FIRST_SIZE = 1024
_BACK = np.arange(MAX_MATCH)


class Drafter(Protocol):
    def propose(
        self, sequence: SequenceView, num_known: int, newest: Sequence[int], assumed: Sequence[int] = ()
    ) -> Proposal:
        """At most MAX_DRAFTS guesses of the tokens behind `num_known` tokens of the sequence's list, `newest` and
        `assumed`, which are guesses."""
        ...


class Lookup:
    """A `Drafter`. It keeps a copy of each living sequence's tokens as an array."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[SequenceView, _Text] = WeakKeyDictionary()

    def propose(
        self, sequence: SequenceView, num_known: int, newest: Sequence[int], assumed: Sequence[int] = ()
    ) -> Proposal:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        text.add(sequence.token_ids[text.num_tokens : num_known])
        text.add(newest[text.num_tokens - num_known :])
        return text.continuation_behind(assumed) if assumed else text.continuation()


class _Text:
    """The tokens of a sequence, and the copy of its newest tokens that the last proposal came from."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens = np.zeros(_FIRST_SIZE, np.int32)
        self._next, self._match = 0, 0  # place behind the copy, and its length; 0 = none

    def add(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        end = self.num_tokens + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros(max(end, len(self._tokens)), np.int32)))
        self._tokens[self.num_tokens : end] = token_ids
        if self._match and (self._tokens[self._next : self._next + len(token_ids)] == token_ids).all():
            self._next, self._match = self._next + len(token_ids), self._match + len(token_ids)
        else:
            self._match = 0
        self.num_tokens = end

    def continuation(self) -> Proposal:
        """The tokens behind the current match. Without a match, `_find` looks for the longest of the latest MAX_COPIES
        copies. A continuation that ends at the newest token is repeated."""
        if not self._match and self.num_tokens > MIN_MATCH:
            self._find()
        if not self._match:
            return NO_PROPOSAL
        followed = self._tokens[self._next : min(self._next + MAX_DRAFTS, self.num_tokens)]
        return Proposal.copied(tuple(np.resize(followed, MAX_DRAFTS).tolist()), self._match)

    def continuation_behind(self, assumed: Sequence[int]) -> Proposal:
        """`continuation` if `assumed` were the next tokens."""
        known = self.num_tokens, self._next, self._match
        self.add(assumed)
        found = self.continuation()
        self.num_tokens, self._next, self._match = known
        return found

    def _find(self) -> None:
        tokens = self._tokens[: self.num_tokens]
        ends = _latest_copies(tokens[-RECENT:]) + max(0, self.num_tokens - RECENT)
        if len(ends) < MAX_COPIES and self.num_tokens > RECENT:
            ends = _latest_copies(tokens)
        if not len(ends):
            return
        places = ends[:, None] - _BACK[: self.num_tokens]
        equal = (tokens[places] == tokens[-1 - _BACK[: self.num_tokens]]) & (places >= 0)
        lengths = np.where(equal.all(axis=1), equal.shape[1], equal.argmin(axis=1))[::-1]  # the latest first
        best = int(lengths.argmax())
        self._next, self._match = int(ends[-1 - best]) + 1, int(lengths[best])


def _latest_copies(tokens: np.ndarray) -> np.ndarray:
    """Places of the second token of each of the latest copies of the two newest tokens. # int32 [n] -> int64 [<= 16]"""
    return ((tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2])).nonzero()[0][-MAX_COPIES:] + 1


class Proposer:
    """The proposals of a step's output, by a drafter and by the grammars of the sequences; without a drafter, none."""

    def __init__(self, drafter: Drafter | None, grammars: Grammars | None = None) -> None:
        self._drafter, self._grammars = drafter, grammars

    def propose(
        self,
        step: StepPlan,
        promised: PromisedTokens,
        sampled: Mapping[str, tuple[SampledToken, ...]],
    ) -> Mapping[str, Proposal]:
        """By sequence id. `promised` and `sampled`: of this step."""
        if self._drafter is None or not step.wants_proposals:
            return NO_PROPOSALS
        proposed: dict[str, Proposal] = {}
        written: list[GrammarRow] = []
        for view, start, num_tokens, _, is_promised, _ in step.chunks:
            name, sampling = view.sequence_id, view.sampling
            if name not in sampled or not sampling.speculation:
                continue
            newest = [token.token_id for token in sampled[name]]
            num_known = start + num_tokens
            if is_promised:
                num_known -= 1
                newest.insert(0, promised[name])
            if not sampling.grammar:
                found = self._drafter.propose(view, num_known, newest)
                if found.token_ids:
                    proposed[name] = found
            else:
                written.append(GrammarRow(view, num_known, tuple(newest)))
        if written:
            assert self._grammars is not None, "the worker has refused grammars"
            for row, found in zip(written, self._grammars.propose(written, self._guess), strict=True):
                if found.token_ids:
                    proposed[row.sequence.sequence_id] = found
        return proposed

    def _guess(self, row: GrammarRow) -> Proposal:
        assert self._drafter is not None, "no drafter, no proposals"
        return self._drafter.propose(row.sequence, row.num_known, row.promised, row.drafts)
