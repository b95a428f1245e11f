"""Reads grammars: which tokens may come next in an output. Built on llguidance, with the token bytes of our tokenizer.

    router   compile(grammar)      a request whose grammar is wrong or too large is refused
    worker   compile(grammar)      off the event loop, when a sequence arrives
             begin(rows) -> masks  on a thread of its own, while the model computes the logits that the masks are for

A matcher is a cache: it has consumed a start of an output, and follows the rest when it is asked. One that is missing,
or has gone too far, is made again from the grammar and the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from core.errors import InvalidRequest, TandemError
from core.output_grammar import GrammarRow, Masks
from core.scheduling.drafts import MAX_DRAFTS
from core.step import NO_PROPOSAL, Proposal, SequenceView
from text.schema_patterns import check_patterns
from text.tokenizer import ModelTokenizer

FIELD = "output_format"
MAX_GRAMMARS = 128  # compiled ones that are kept
# On one core, 100 objects of 20 properties take 42 ms to compile and 12 ms for a mask; most take 5 ms and 50 us.
_LIMITS = LLParserLimits(
    max_grammar_size=25_000, initial_lexer_fuel=60_000, step_lexer_fuel=60_000, verbose_errors=False
)
# No limit of llguidance counts these: a multiple of 999,983 takes 10 s to compile, one of 10,007 takes 50 ms.
MAX_MULTIPLE = 20_000  # the least common multiple of all `multipleOf`, without their decimal points
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([0-9.]+(?:[eE][+-]?[0-9]{1,3})?)')
_ESCAPED_LETTER = re.compile(r"\\u00([4-7][0-9a-fA-F])")


class GrammarReader:
    """A `core.output_grammar.Grammars`. Its methods may be called on any thread."""

    def __init__(self, load_tokenizer: Callable[[], ModelTokenizer]) -> None:
        """`load_tokenizer` is called once, at the first grammar. The threads use the cores of the caller's thread."""
        self._load_tokenizer = load_tokenizer
        self._compiling, self._changing = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # that have consumed nothing; the oldest use first
        self._matchers: WeakKeyDictionary[SequenceView, _Matcher] = WeakKeyDictionary()
        # A thread starts at its first task, from a thread that may be pinned to the core of the model.
        use_cores = partial(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler", use_cores)
        self._masks = ThreadPoolExecutor(1, "grammar-masks", use_cores)
        self._executor = LLExecutor(1)

    def compile(self, grammar: str) -> None:
        """Raises `InvalidRequest` for a grammar that is wrong, or too large."""
        self._compile(grammar)

    def num_accepted(self, grammar: str, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the start of an output on, follow the grammar. Raises `InvalidRequest`."""
        return int(self._compile(grammar).deep_copy().validate_tokens(list(token_ids)))

    async def compile_aside(self, grammar: str) -> None:
        """As `compile`, without blocking the event loop."""
        with self._changing:
            known = grammar in self._compiled
        if not known:
            await asyncio.get_running_loop().run_in_executor(self._compiler, self._compile, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        with self._changing:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        _check_multiples(grammar)
        try:
            check_patterns(grammar)
        except ValueError as error:
            raise InvalidRequest(FIELD, str(error)) from None
        with self._compiling:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask of all is the slowest
        if matcher.is_error():
            raise _refused(matcher)
        with self._changing:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = self._load_tokenizer()
        if not tokenizer.eos_token_ids:
            raise InvalidRequest(FIELD, "this model has no end-of-sequence token, so no output can be complete")
        return make_ll_tokenizer(tokenizer)

    def begin(self, rows: Sequence[GrammarRow]) -> Callable[[], Masks]:
        return self._masks.submit(self._masks_of, rows).result

    def _masks_of(self, rows: Sequence[GrammarRow]) -> Masks:
        """Few calls for all rows: each call gives up the interpreter's lock, which the model's thread takes back."""
        failed: dict[str, TandemError] = {}
        found: dict[str, _Matcher] = {}
        for row in rows:
            try:
                found[row.sequence.sequence_id] = self._follow(row)
            except InvalidRequest as error:  # of a grammar that no check has seen
                failed[row.sequence.sequence_id] = error
        if not found:
            return Masks({}, failed)
        one_more = [(one.matcher, one.behind[0]) for one in found.values() if len(one.behind) == 1]
        if one_more:
            self._executor.consume_token_par(one_more)
        for one in found.values():
            if len(one.behind) > 1:
                one.matcher.consume_tokens(one.behind)
            one.behind = []
        drafts = [list(row.drafts) for row in rows if row.sequence.sequence_id in found]
        allowed: dict[str, tuple[bytes, ...]] = {}
        for (name, one), masks in zip(found.items(), self._computed(list(found.values()), drafts), strict=True):
            if one.matcher.is_error():
                failed[name] = _refused(one.matcher)
            else:
                allowed[name] = masks
        return Masks(allowed, failed)

    def _computed(self, found: Sequence[_Matcher], drafts: Sequence[list[int]]) -> list[tuple[bytes, ...]]:
        """The masks of each matcher: of its next token, and behind each of its drafts that it allows."""
        ends = list(accumulate(len(guesses) + 1 for guesses in drafts))
        masks = np.zeros((sum(ends[-1:]), self._mask_words), np.uint32)  # 0: behind a draft that is not allowed
        places = [
            (one.matcher, end - len(guesses) - 1, guesses)
            for one, end, guesses in zip(found, ends, drafts, strict=True)
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

    @property
    def _mask_words(self) -> int:
        return -(-int(self._tokenizer.vocab_size) // 32)

    def propose(self, rows: Sequence[GrammarRow], guess: Callable[[GrammarRow], Proposal]) -> list[Proposal]:
        return self._masks.submit(lambda: [self._propose(row, guess) for row in rows]).result()

    def _propose(self, row: GrammarRow, guess: Callable[[GrammarRow], Proposal]) -> Proposal:
        try:
            found = self._follow(row)
        except InvalidRequest:  # the masks of the next step say it
            return NO_PROPOSAL
        if found.behind:
            found.matcher.consume_tokens(found.behind)
            found.behind = []
        if found.matcher.is_error() or found.matcher.is_stopped():
            return NO_PROPOSAL
        ahead, proposal = found.matcher.deep_copy(), NO_PROPOSAL
        while (num_left := MAX_DRAFTS - len(proposal.token_ids)) > 0:
            following = Proposal.forced(tuple(ahead.compute_ff_tokens()))
            if not following.token_ids:
                following = guess(row._replace(drafts=proposal.token_ids))
            num_allowed = ahead.try_consume_tokens(list(following.token_ids[:num_left]))
            if not num_allowed:
                break
            proposal = proposal.with_next(following, num_allowed)
        return proposal

    def _follow(self, row: GrammarRow) -> _Matcher:
        """The matcher of the row's sequence, with the tokens that it has not consumed."""
        view = row.sequence
        num_output = row.num_known + len(row.promised) - view.num_prompt_tokens
        found = self._matchers.get(view)
        if found is None or found.num_consumed > num_output:
            found = self._matchers[view] = _Matcher(self._compile(view.sampling.grammar).deep_copy())
        first = view.num_prompt_tokens + found.num_consumed
        behind = [*view.token_ids[first : row.num_known], *row.promised[max(0, first - row.num_known) :]]
        found.behind = [] if found.matcher.is_stopped() else behind  # an output that has ended may only end again
        found.num_consumed = num_output
        return found


class _Matcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_consumed = 0  # tokens of the output, with those in `behind`
        self.behind: list[int] = []


def _check_multiples(grammar: str) -> None:
    """Of all schemas in the grammar. Their keys may be written with escapes."""
    if "multiple" not in grammar and "\\u00" not in grammar:
        return
    text, least = _ESCAPED_LETTER.sub(lambda found: chr(int(found[1], 16)), grammar), 1
    for number in _MULTIPLE_OF.findall(text):
        with contextlib.suppress(ValueError):  # llguidance refuses what is no number
            least = math.lcm(least, Fraction(number).numerator or 1)
        if least > MAX_MULTIPLE:
            limit = f"the least common multiple of all multipleOf may be at most {MAX_MULTIPLE}"
            raise InvalidRequest(FIELD, f"{limit}, without decimal points; it is {least} with {number[:40]}")


def _refused(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(FIELD, " ".join(matcher.get_error().split())[:500])


class _Vocabulary(TokenizerWrapper):
    """The tokens of a `ModelTokenizer`, as llguidance wants them. Texts that a grammar forces get canonical tokens."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._own = tokenizer
        special = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self.tokens = [
            b"\xff" + special[token_id].encode() if token_id in special else tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.info.vocab_size)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids whose bytes are those of `text`."""
        raw = text if isinstance(text, bytes) else text.encode()
        readable = raw.decode(errors="replace")
        with contextlib.suppress(InvalidRequest):  # of texts that are no prompt
            token_ids = self._own.encode(readable, add_special=False, parse_special=False)
            if b"".join(self.tokens[token_id] for token_id in token_ids) == raw:  # some models put a space before it
                return token_ids
        return [] if self.greedy is None else list(self.greedy.greedy_tokenize(readable))


def make_ll_tokenizer(tokenizer: ModelTokenizer) -> LLTokenizer:
    vocabulary: Any = _Vocabulary(tokenizer)
    made = LLTokenizer(vocabulary, n_vocab=tokenizer.info.vocab_size, eos_token=sorted(tokenizer.eos_token_ids))
    vocabulary.greedy = made
    return made
