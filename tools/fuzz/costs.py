"""The cost of every parser of client bytes, on inputs that grow from nasty pieces up to the limit of the parser.

Law: four times the size costs at most `GROWTH` times the time. A parser on the event loop takes at most `TURN_S` a
turn. A parser in a thread holds the interpreter lock for at most `TURN_S` at a time, and ends within its own bound.
A parser whose library breaks that holds the lock for at most the time that its row states.

Time is that of the CPU on the thread that parses, and the least of up to `TRIES`: a busy machine makes no parser slow.
A hold of the lock is what the parser computes between two ticks of a thread that needs the lock. With `BUSY_SLACK`, as
in `make test`, a parser fails only at ten times the law: one of quadratic time is a hundred times over it at 64 KB.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from core.errors import InvalidRequest, ModelNotFound
from gateway.errors import ApiError
from tools.fuzz.growing import Grown

TURN_S = 0.05
GROWTH = 6.0  # of the time, where the size grows by 4
LEAST_S = 0.01  # a shorter time says little about growth
TRIES = 3  # but a cost three times as far outside is no accident
NUM_SIZES = 4  # the limit of the parser, a quarter of it, ...
TICK_S = 0.002
BUSY_SLACK = 10.0
REFUSALS = (InvalidRequest, ModelNotFound, ApiError, ValidationError)

Turns = Iterator[object]  # a parser works until the next item in one turn of the loop


@dataclass(frozen=True, slots=True)
class Parser:
    limit: int  # characters of the largest input
    grow: Callable[[random.Random], Grown]
    parse: Callable[[Any], Turns]  # refuses with a typed error, which it raises
    ends_s: float = 0.0  # in a thread, within this CPU time; 0 = on the loop
    holds_s: float = TURN_S  # of the lock, or of one turn


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    longest_s: float  # turn, or hold of the lock


def costs(rng: random.Random, count: int, parsers: dict[str, Parser], slack: float) -> Counter[str]:
    """Parse inputs of up to `count` sizes. Raises `AssertionError` for a parser outside the law times `slack`."""
    names = rng.sample(list(parsers), len(parsers))
    for parser in parsers.values():
        _on_the_loop(parser, parser.grow(random.Random(0)).of(64))  # what is loaded once counts for nothing
    with _frozen():
        cycled = itertools.islice(itertools.cycle(names), max(1, count // NUM_SIZES))
        return Counter(outcome for name in cycled for outcome in _outcomes(name, parsers[name], rng, slack))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """As a service once it has started: else each collection, 50 ms, looks at the objects of all imports."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _outcomes(name: str, parser: Parser, rng: random.Random, slack: float) -> Iterator[str]:
    """Of one input, in each size."""
    grown = parser.grow(rng)
    sizes = [parser.limit // 4**step for step in reversed(range(NUM_SIZES))]
    found: list[Cost] = []
    for size in sizes:
        outcome, cost = _least(parser, grown.of(size), found, slack)
        found.append(cost)
        if fault := _fault(parser, found, slack):
            raise AssertionError(f"{name}: {fault}\nsizes {sizes}: {found}\ninput: {grown.what}")
        yield f"{name} {outcome}"


def _fault(parser: Parser, found: list[Cost], slack: float) -> str:
    """Of the last cost; "" = inside the law."""
    last = found[-1]
    if last.longest_s > slack * parser.holds_s:
        return f"{'holds the lock' if parser.ends_s else 'a turn'}: {1e3 * last.longest_s:.0f} ms"
    if parser.ends_s and last.cpu_s > slack * parser.ends_s:
        return f"ends after {last.cpu_s:.2f} s"
    for steps, earlier in enumerate(reversed(found[:-1]), start=1):
        if last.cpu_s > slack * GROWTH**steps * max(earlier.cpu_s, LEAST_S):
            return f"{4**steps} times the size takes {last.cpu_s / earlier.cpu_s:.0f} times the time"
    return ""


def _least(parser: Parser, value: object, found: list[Cost], slack: float) -> tuple[str, Cost]:
    """The outcome, and the least cost of several tries: of one, if it is inside the law."""
    best = Cost(float("inf"), float("inf"))
    for attempt in itertools.count(1):
        gc.collect(0)
        outcome, cost = _in_thread(parser, value) if parser.ends_s else _on_the_loop(parser, value)
        best = Cost(min(best.cpu_s, cost.cpu_s), min(best.longest_s, cost.longest_s))
        if attempt == TRIES or not _fault(parser, [*found, best], slack) or _fault(parser, [*found, best], 3 * slack):
            return outcome, best
    raise AssertionError


def _on_the_loop(parser: Parser, value: object) -> tuple[str, Cost]:
    total_s = longest_s = 0.0
    outcome, began_s = "parsed", time.thread_time()
    turns = parser.parse(value)
    while True:
        try:
            ended = next(turns, turns)
        except REFUSALS as error:
            outcome, ended = type(error).__name__, turns
        now_s = time.thread_time()
        if ended is not Ellipsis:  # the turn before belongs to another parser
            total_s, longest_s = total_s + now_s - began_s, max(longest_s, now_s - began_s)
        began_s = time.thread_time()
        if ended is turns:
            return outcome, Cost(total_s, longest_s)


def _in_thread(parser: Parser, value: object) -> tuple[str, Cost]:
    """A second thread ticks. While the parser holds the lock, it cannot."""
    results: list[tuple[str, Cost] | BaseException] = []
    may_end = threading.Event()  # the clock of a thread ends with the thread

    def work() -> None:
        try:
            results.append(_on_the_loop(parser, value))
        except BaseException as error:  # noqa: BLE001 - raised below
            results.append(error)
        may_end.wait()

    working = threading.Thread(target=work)
    began_s = time.process_time()  # a compiler of grammars has a thread of its own
    working.start()
    clock = time.pthread_getcpuclockid(working.ident or 0)
    longest_s = last_s = 0.0
    has_ended = False
    while not has_ended:
        has_ended = bool(results)
        now_s = time.clock_gettime(clock)
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        time.sleep(0 if has_ended else TICK_S)
    may_end.set()
    working.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0][0], Cost(time.process_time() - began_s, longest_s)
