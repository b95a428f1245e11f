"""Transcripts: tests of a machine as texts. Each line has an event and, behind "->", all the actions it returns.

    a hand-off takes each block when it is announced                     the name of a test
      arrive a 6 max=2 ticket=1  -> connect peer; want 1: 0 1            two actions of one event
      ready 1 0 1 tokens=20      -> read 1: 0 1
      blocks                     -> incoming 2                           a question, which changes nothing
      reads                      -> first step a 6+1; release 1
                                 -> tokens a 0: 20                       a second line of actions of the same event

The first word of an event is a method of a subclass of `Replay`, the other words are its arguments. A surplus action
fails like a missing one. There are no variables and no conditions: a test that needs them is a Python function that
calls the same methods.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from core.errors import TandemError


class Replay:
    """Drives a machine. A word returns the actions of the machine, or lines about it."""

    def seen(self, action: Any) -> str:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def do(self, word: str, *words: str) -> list[Any]:
        options = {name: value_of(text) for name, text in (word.split("=") for word in words if "=" in word)}
        actions: list[Any] = getattr(self, word)(*(value_of(word) for word in words if "=" not in word), **options)
        return actions

    def line(self, event: str) -> list[str]:
        """The event, and the actions that it returns."""
        try:
            actions = self.do(*event.split())
        except TandemError as error:
            self.check()
            actions = [f"refused {error_words(error)}"]
        words = [action if isinstance(action, str) else self.seen(action) for action in actions]
        return [event, *(f"  -> {word.replace(';', ',')}" for word in words)]  # a semicolon separates actions

    def play(self, text: str) -> None:
        """Post all events of the text, and compare all actions with those of the text."""
        expected = _lines(text)
        found = [line for event in expected if not event.startswith("  ->") for line in self.line(event)]
        assert found == expected, "\n" + "\n".join(difflib.ndiff(expected, found))


def transcripts_of(begin: Callable[[], Replay], text: str, setup: str = "") -> Callable[[str], None]:
    """A pytest function with a case for each test of the text. Each test begins with the lines of `setup`."""
    parts = re.split(r"^(?! |$)(.+)$", text, flags=re.MULTILINE)[1:]
    tests = dict(zip(parts[::2], parts[1::2], strict=True))
    assert 2 * len(tests) == len(parts), "two tests have one name"

    @pytest.mark.parametrize("name", tests)
    def replay(name: str) -> None:
        begin().play(setup + tests[name])

    return replay


def _lines(text: str) -> list[str]:
    """The text without comments, each event and each action on a line of its own."""
    lines = []
    for line in text.splitlines():
        event, *actions = re.split(r"->|; ", re.sub(r"(^|\s)# .*", "", line))
        lines += [" ".join(event.split())] if event.strip() else []
        lines += [f"  -> {' '.join(action.split())}" for action in actions if action.strip()]
    return lines


# ---- words


def value_of(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def numbers_of(*words: int | str) -> list[int]:
    """Of words like "1..4", "1,2,3,4" or 1."""
    numbers: list[int] = []
    for word in words:
        first, dots, last = str(word).partition("..")
        numbers += range(int(first), int(last) + 1) if dots else [int(number) for number in first.split(",") if number]
    return numbers


def runs(numbers: Sequence[int]) -> str:
    """The reverse of `numbers_of`."""
    is_run = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}..{numbers[-1]}" if is_run else " ".join(map(str, numbers))


def error_words(error: TandemError) -> str:
    return f"{type(error).__name__}: {error}"


def counts(pairs: Iterable[tuple[str, float]]) -> list[str]:
    """Each number that is not 0, with its name."""
    return [f"{name} {number:g}" for name, number in pairs if number]
