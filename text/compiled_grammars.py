"""Compiles grammars, one at a time, and keeps those that were used last. For every thread.

llguidance follows references by recursion: a schema of 18 KB whose $ref lead from one to the next takes more than the
8 MB of a usual stack, and the process would end. So one thread with a large stack compiles everything.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.errors import InvalidRequest
from text.grammar_account import FIELD
from text.grammar_limits import check_limits
from text.grammar_vocabulary import make_ll_tokenizer
from text.tokenizer import ModelTokenizer

MAX_GRAMMARS = 128  # compiled grammars that are kept; beyond: the least recently used is compiled again
# Limit: their bytes; one takes 0.1 MB, the largest 10 MB; beyond: the least recently used is compiled again
MAX_KEPT_BYTES = 64 * 1024 * 1024
MAX_COMPILE_S = 1.0  # of a CPU: no known grammar within the limits takes a fifth of it
_STACK_BYTES = 256 * 1024 * 1024  # 64 KB of nested schemas take 50 MB; what is not used takes no memory
# On one core, 60 objects of 20 properties take 40 ms to compile, and most schemas 5 ms. A mask takes 50 us for most
# places of a schema, with at most 700 items in a row and 7,000 in all, and 20 ms at these limits.
_LIMITS = LLParserLimits(
    max_grammar_size=10_000,
    initial_lexer_fuel=60_000,
    step_lexer_fuel=60_000,
    max_items_in_row=700,
    step_max_items=20_000,
    max_lexer_states=10_000,  # 5 MB for each sequence
    verbose_errors=False,
)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Measures(NamedTuple):
    wall_s: Callable[[], float] = time.perf_counter
    cpu_s: Callable[[], float] = time.thread_time  # of the calling thread
    resident_bytes: Callable[[], int] = _resident_bytes


class _Kept(NamedTuple):
    matcher: LLMatcher  # that has consumed nothing
    num_bytes: int


class CompiledGrammars:
    def __init__(self, load_tokenizer: Callable[[], ModelTokenizer], measures: Measures) -> None:
        self._load_tokenizer, self._measures = load_tokenizer, measures
        self._changing = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the oldest use first
        self._num_bytes = 0
        self._compiler = _deep_thread()

    def find(self, grammar: str) -> LLMatcher | None:
        with self._changing:
            if grammar not in self._kept:
                return None
            self._kept.move_to_end(grammar)
            return self._kept[grammar].matcher

    def get(self, grammar: str) -> LLMatcher:
        """Raises `InvalidRequest` for a grammar that is wrong, too large or too slow."""
        return self.find(grammar) or self.start(grammar).result()

    def start(self, grammar: str) -> Future[LLMatcher]:
        return self._compiler.submit(self._compile, grammar)

    def warm_up(self) -> None:
        """Read the tokens of the model in the background."""
        self._compiler.submit(lambda: self.tokenizer)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        tokenizer = self._load_tokenizer()
        if not tokenizer.eos_token_ids:
            raise InvalidRequest(FIELD, "this model has no end-of-sequence token, so no output can be complete")
        return make_ll_tokenizer(tokenizer)

    def _compile(self, grammar: str) -> LLMatcher:
        if (known := self.find(grammar)) is not None:
            return known
        try:
            check_limits(grammar)
        except ValueError as error:
            raise InvalidRequest(FIELD, str(error)) from None
        tokenizer = self.tokenizer
        began_s, before = self._measures.cpu_s(), self._measures.resident_bytes()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # the first mask of all is the slowest
        if matcher.is_error():
            raise refusal(matcher)
        if self._measures.cpu_s() - began_s > MAX_COMPILE_S:
            raise InvalidRequest(FIELD, f"the grammar takes more than {MAX_COMPILE_S:.0f} s to read")
        # Memory that an earlier grammar has left counts with that grammar alone, so the sum never grows without end.
        self._keep(grammar, _Kept(matcher, max(len(grammar), self._measures.resident_bytes() - before)))
        return matcher

    def _keep(self, grammar: str, kept: _Kept) -> None:
        with self._changing:
            self._kept[grammar] = kept
            self._num_bytes += kept.num_bytes
            while len(self._kept) > 1 and (len(self._kept) > MAX_GRAMMARS or self._num_bytes > MAX_KEPT_BYTES):
                self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes


def refusal(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(FIELD, " ".join(matcher.get_error().split())[:500])


def _deep_thread() -> ThreadPoolExecutor:
    """A thread with a deep stack, on the caller's cores. Its first task may come from a thread on the model's core."""
    made = ThreadPoolExecutor(1, "grammar-compiler", partial(os.sched_setaffinity, 0, os.sched_getaffinity(0)))
    usual = threading.stack_size(_STACK_BYTES)
    try:
        made.submit(int)  # starts the thread
    finally:
        threading.stack_size(usual)
    return made
