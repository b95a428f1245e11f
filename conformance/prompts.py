"""Prompts of the check: real text, each with a code of its own that the model is asked to repeat. Pure.

    Note 4821. The code of this note is amber falcon. <plain sentences, cut to the wanted length> Again, the code of
    this note is

Random tokens would make ties. A code that stands in the answer to another prompt shows KV or a stream of that prompt.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

_FIRST = (
    "amber", "brass", "cedar", "coral", "dusty", "frozen", "golden", "hollow", "jade", "lunar", "marble", "noble",
    "olive", "plain", "quiet", "ruby", "silver", "velvet",
)  # fmt: skip
_SECOND = (
    "anchor", "beacon", "candle", "dragon", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "meadow", "needle", "orchard", "pepper", "ribbon", "timber",
)  # fmt: skip
_SENTENCES = (
    "The river runs from the hills to the sea, and on its way it passes three old mills.",
    "In the morning the baker opens the door of the shop and puts the first bread on the shelf.",
    "A train leaves the station every hour, and the people on the platform wait for it in the rain.",
    "The teacher wrote a long word on the board, and the children read it aloud.",
    "When the snow melts in spring, the water in the lake rises, and the boats go out again.",
    "The old clock on the wall of the town hall has told the time for more than a hundred years.",
    "She put the letter on the table, looked out of the window, and saw the garden in the sun.",
    "The farmer counts his sheep in the evening and closes the gate behind the last one.",
)
EDGE_TOKENS = 64  # block sizes of engines (16, 32, 64, 128) divide these lengths, or are divided by them
EDGES = tuple(k * EDGE_TOKENS + beside for k in (1, 2, 4) for beside in (-1, 0, 1))
LONG_TOKENS = 700
MAX_PROMPTS = len(_FIRST) * len(_SECOND)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Plain text of `num_words` words, from sentence `start` on, and `num_letters` letters precede the question."""

    number: int
    code: str
    start: int
    num_words: int
    num_letters: int = 0

    @property
    def text(self) -> str:
        sentences = " ".join(_SENTENCES[self.start :] + _SENTENCES[: self.start]).split()
        words = itertools.islice(itertools.cycle(sentences), self.num_words)
        middle = " ".join([*words, *["a"] * self.num_letters])
        return f"Note {self.number}. The code of this note is {self.code}. {middle} Again, the code of this note is"


class PromptSource:
    """Prompts that no earlier request of this run had, and with another seed most likely no other run."""

    def __init__(self, seed: int) -> None:
        draws = random.Random(seed)
        self._codes = [f"{first} {second}" for first in _FIRST for second in _SECOND]
        draws.shuffle(self._codes)
        self._numbers = draws.sample(range(1000, 10_000), 4 * MAX_PROMPTS)

    def next(self, num_words: int) -> Prompt:
        """Raises `IndexError` after `MAX_PROMPTS` prompts."""
        number = self._numbers.pop()
        return Prompt(number, self._codes.pop(), number % len(_SENTENCES), num_words)

    def renumbered(self, prompt: Prompt) -> Prompt:
        """As long as `prompt`, with no prefix in common but its first word."""
        return replace(prompt, number=self._numbers.pop())


def is_edge(num_tokens: int) -> bool:
    return (num_tokens + 1) % EDGE_TOKENS <= 2


def foreign_code(text: str, own: Prompt, others: list[Prompt]) -> Prompt | None:
    """The prompt whose code stands in `text`, if it is not `own`."""
    return next((other for other in others if other.code in text and other.code != own.code), None)
