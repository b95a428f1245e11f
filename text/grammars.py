"""Reads grammars: which tokens may come next in an output. Built on llguidance, with the token bytes of our tokenizer.

    router   compile(grammar)      a request whose grammar is wrong or too large is refused
    worker   compile(grammar)      off the event loop, when a sequence arrives
             begin(rows) -> masks  on a thread of its own, while the model computes the logits that the masks are for

A matcher is a cache: it has consumed a start of an output, and follows the rest when it is asked. One that is missing,
or has gone too far, is made again from the grammar and the output.

All sequences of a step wait for its masks. Limits bound one mask (text/compiled_grammars.py), and an account bounds
those of one sequence (text/grammar_account.py): after a step that took long, each row is computed alone and on the
clock, and a sequence that takes too long ends alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, takewhile
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher

from core.errors import DeadlineExceeded, InvalidRequest, TandemError
from core.output_grammar import GrammarRow, Masks
from core.scheduling.drafts import MAX_DRAFTS
from core.step import NO_PROPOSAL, Proposal, SequenceView
from text.compiled_grammars import CompiledGrammars, Measures, refusal
from text.grammar_account import FOLLOW_S, MASK_S, Account, has_slow_row
from text.tokenizer import ModelTokenizer

_SLICE = 8  # tokens of an output that are followed at once
_CLOCKS = Measures()


def _never() -> bool:
    return False


class GrammarReader:
    """A `core.output_grammar.Grammars`. Its methods may be called on any thread."""

    def __init__(self, load_tokenizer: Callable[[], ModelTokenizer], measures: Measures = _CLOCKS) -> None:
        """`load_tokenizer` is called once, at the first grammar. The threads use the cores of the caller's thread."""
        self._compiled = CompiledGrammars(load_tokenizer, measures)
        self._measures = measures
        self._followed: WeakKeyDictionary[SequenceView, _Followed] = WeakKeyDictionary()
        # A thread starts at its first task, from a thread that may be pinned to the core of the model.
        use_cores = partial(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        self._masks = ThreadPoolExecutor(1, "grammar-masks", use_cores)
        self._executor = LLExecutor(1)
        self._is_measuring = False  # each row alone

    def compile(self, grammar: str) -> None:
        """Raises `InvalidRequest` for a grammar that is wrong, or too large."""
        self._compiled.get(grammar)

    def num_accepted(self, grammar: str, token_ids: Sequence[int], is_late: Callable[[], bool] = _never) -> int:
        """How many of these tokens, from the start of an output on, follow the grammar.

        Raises `InvalidRequest`, and `DeadlineExceeded` once `is_late`.
        """
        matcher, account = self._compiled.get(grammar).deep_copy(), Account()
        for first in range(0, len(token_ids), _SLICE):
            if is_late():
                raise DeadlineExceeded("the deadline passed before the tokens were compared with the output format")
            part, began_s = list(token_ids[first : first + _SLICE]), self._measures.cpu_s()
            num_taken = int(matcher.try_consume_tokens(part))
            account.charge(self._measures.cpu_s() - began_s, len(part) * FOLLOW_S)
            account.check()
            if matcher.is_error():
                raise refusal(matcher)
            if num_taken < len(part):
                return first + num_taken
        return len(token_ids)

    async def compile_aside(self, grammar: str) -> None:
        """As `compile`, without blocking the event loop."""
        if self._compiled.find(grammar) is None:
            await asyncio.wrap_future(self._compiled.start(grammar))

    def warm_up(self) -> None:
        """Read the tokens of the model in the background, before the first grammar."""
        self._compiled.warm_up()

    def begin(self, rows: Sequence[GrammarRow]) -> Callable[[], Masks]:
        return self._masks.submit(self._masks_of, rows).result

    def _masks_of(self, rows: Sequence[GrammarRow]) -> Masks:
        failed: dict[str, TandemError] = {}
        found: dict[str, _Followed] = {}
        for row in rows:
            try:
                found[row.sequence.sequence_id] = self._follow(row)
            except InvalidRequest as error:  # of a grammar that no check has seen, or that is too slow
                failed[row.sequence.sequence_id] = error
        if not found:
            return Masks({}, failed)
        followed = list(found.values())
        if self._is_measuring:
            computed = [self._computed_alone(one) for one in followed]
            self._is_measuring = any(one.account.debt_s > 0 for one in followed)
        else:
            began_s = self._measures.wall_s()
            self._catch_up(followed)
            computed = self._computed(followed, [list(row.drafts) for row in rows if row.sequence.sequence_id in found])
            self._is_measuring = has_slow_row(self._measures.wall_s() - began_s, len(followed))
        allowed: dict[str, tuple[bytes, ...]] = {}
        for (name, one), masks in zip(found.items(), computed, strict=True):
            try:
                one.check()
                allowed[name] = masks
            except InvalidRequest as error:
                failed[name] = error
        return Masks(allowed, failed)

    def _catch_up(self, followed: Sequence[_Followed]) -> None:
        """Few calls for all rows: each call gives up the interpreter's lock, which the model's thread takes back."""
        one_more = [(one.matcher, one.behind[0]) for one in followed if len(one.behind) == 1]
        if one_more:
            self._executor.consume_token_par(one_more)
        for one in followed:
            if len(one.behind) > 1:
                one.catch_up(self._measures.cpu_s)
            one.behind = []

    def _computed(self, followed: Sequence[_Followed], drafts: Sequence[list[int]]) -> list[tuple[bytes, ...]]:
        """The masks of each matcher: of its next token, and behind each of its drafts that it allows."""
        ends = list(accumulate(len(guesses) + 1 for guesses in drafts))
        masks = np.zeros((sum(ends[-1:]), self._mask_words), np.uint32)  # 0: behind a draft that is not allowed
        places = [
            (one.matcher, end - len(guesses) - 1, guesses)
            for one, end, guesses in zip(followed, ends, drafts, strict=True)
        ]
        where = masks.ctypes.data, masks.strides[0], len(masks)
        if without := [(matcher, row) for matcher, row, guesses in places if not guesses]:
            self._executor.unsafe_compute_mask_ptr(without, *where)
        if behind := [place for place in places if place[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(behind, *where)
        return [
            tuple(mask.tobytes() for mask in takewhile(np.any, masks[first : first + len(guesses) + 1]))
            if guesses
            else (masks[first].tobytes(),)
            for _, first, guesses in places
        ]

    def _computed_alone(self, one: _Followed) -> tuple[bytes, ...]:
        """The mask of the next token, on this thread and its clock. Drafts are not taken."""
        one.catch_up(self._measures.cpu_s)
        mask = np.zeros(self._mask_words, np.uint32)
        if not one.account.is_over:
            began_s = self._measures.cpu_s()
            one.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            one.account.charge(self._measures.cpu_s() - began_s, MASK_S)
        return (mask.tobytes(),)

    @property
    def _mask_words(self) -> int:
        return -(-int(self._compiled.tokenizer.vocab_size) // 32)

    def propose(self, rows: Sequence[GrammarRow], guess: Callable[[GrammarRow], Proposal]) -> list[Proposal]:
        return self._masks.submit(lambda: [self._propose(row, guess) for row in rows]).result()

    def _propose(self, row: GrammarRow, guess: Callable[[GrammarRow], Proposal]) -> Proposal:
        try:
            found = self._follow(row)
            found.catch_up(self._measures.cpu_s)
            found.check()
        except InvalidRequest:  # the masks of the next step say it
            return NO_PROPOSAL
        if found.matcher.is_stopped():
            return NO_PROPOSAL
        ahead, proposal, began_s = found.matcher.deep_copy(), NO_PROPOSAL, self._measures.cpu_s()
        while (num_left := MAX_DRAFTS - len(proposal.token_ids)) > 0:
            following = Proposal.forced(tuple(ahead.compute_ff_tokens()))
            if not following.token_ids:
                following = guess(row._replace(drafts=proposal.token_ids))
            num_allowed = ahead.try_consume_tokens(list(following.token_ids[:num_left]))
            if not num_allowed:
                break
            proposal = proposal.with_next(following, num_allowed)
        found.account.charge(self._measures.cpu_s() - began_s, MASK_S)
        return proposal

    def _follow(self, row: GrammarRow) -> _Followed:
        """The matcher of the row's sequence, with the tokens that it has not consumed."""
        view = row.sequence
        num_output = row.num_known + len(row.promised) - view.num_prompt_tokens
        found = self._followed.get(view)
        if found is None:
            found = self._followed[view] = _Followed(self._compiled.get(view.sampling.grammar))
        found.account.check()
        if found.num_consumed > num_output:
            found.restart()
        first = view.num_prompt_tokens + found.num_consumed
        behind = [*view.token_ids[first : row.num_known], *row.promised[max(0, first - row.num_known) :]]
        found.behind = [] if found.matcher.is_stopped() else behind  # an output that has ended may only end again
        found.num_consumed = num_output
        return found


class _Followed:
    """The output of one sequence, as far as its matcher has consumed it."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start
        self.account = Account()
        self.restart()

    def restart(self) -> None:
        self.matcher = self._start.deep_copy()
        self.num_consumed = 0  # tokens of the output, with those in `behind`
        self.behind: list[int] = []

    def catch_up(self, cpu_s: Callable[[], float]) -> None:
        """Consume `behind` until a token fails or the account is over."""
        for first in range(0, len(self.behind), _SLICE):
            part, began_s = self.behind[first : first + _SLICE], cpu_s()
            is_right = self.matcher.consume_tokens(part)
            self.account.charge(cpu_s() - began_s, len(part) * FOLLOW_S)
            if not is_right or self.account.is_over:
                break
        self.behind = []

    def check(self) -> None:
        """Raises `InvalidRequest` for an output that has left its grammar, or whose grammar takes too long."""
        self.account.check()
        if self.matcher.is_error():
            raise refusal(self.matcher)
