"""Which special tokens of a prompt are its frame's. The text of a special token inside content stays text.

    contents --mark--> template --> marked prompt --restore--> text --codec--> token ids
                                          |                                       |
                                          +---- is each special token's text in it unmarked? ----+

`Marks` replaces a few key characters of content by stand-ins of equal length, and each special token has a key
character in its text. So a special token whose text has no stand-in comes from the frame, wherever the template trims,
cuts, repeats or joins content. The text of every other one gets `BREAK` inside, which the codec cuts at and drops.
Prompts without such text are encoded as a whole, unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import ConfigError, InvalidRequest

BREAK = "\ufdd0"
_STAND_INS = tuple(map(chr, range(0xFDD1, 0xFDF0)))  # code points that Unicode keeps for internal use, as BREAK
_MAX_ROUNDS = 4
_RESERVED = re.compile("[\ufdd0-\ufdef]")


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    special: list[tuple[str, int, int]]  # (text of a special token, where it starts, where it ends) in the input


class Codec(Protocol):
    """What differs between tokenizers."""

    strip_first_space: bool

    def encode(self, text: str, add_special: bool) -> Encoded:
        """Special tokens are recognised. `BREAK` belongs to no token, and no token spans one."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def special_tokens(self) -> dict[str, int]: ...


class Marks:
    """Stand-ins for key characters. Each special token has one of the key characters in its text."""

    def __init__(self, keys: Iterable[str]) -> None:
        # A template may change the case of content.
        cased = dict.fromkeys(form for key in keys for form in (key, key.lower(), key.upper()) if len(form) == 1)
        if len(cased) > len(_STAND_INS):
            raise ConfigError(f"the tokenizer's special tokens share too few characters: {len(cased)} are needed")
        self._stand_ins = dict(zip(cased, _STAND_INS, strict=False))

    def mark(self, text: str) -> str:
        for key, stand_in in self._stand_ins.items():
            text = text.replace(key, stand_in)
        return text

    def restore(self, marked: str) -> str:
        for key, stand_in in self._stand_ins.items():
            marked = marked.replace(stand_in, key)
        return marked


def markings(special_texts: Iterable[str]) -> list[Marks]:
    """Ways to mark content, the best first. A template that looks for "</think>" in content needs the second one.

    Raises `ConfigError` where the special tokens need more key characters than there are stand-ins.
    """
    texts = [text for text in special_texts if text.strip()]
    first, second = _key_characters(texts, (_is_letter, _is_in_tags)), _key_characters(texts, (_is_in_tags, _is_letter))
    return [Marks(first)] if first == second else [Marks(first), Marks(second)]


def refuse_reserved(field: str, text: str) -> None:
    """Raises `InvalidRequest` where `text` has characters that stand for something here."""
    if not text.isascii() and _RESERVED.search(text):
        raise InvalidRequest(field, "must not contain the noncharacters U+FDD0 to U+FDEF")


def encode_framed(codec: Codec, marks: Marks, marked: str, add_special: bool) -> list[int]:
    """Token ids of a marked prompt: the special tokens are those that its unmarked text spells out."""
    for _ in range(_MAX_ROUNDS):
        encoded = codec.encode(marks.restore(marked), add_special)
        forged = [(start, end) for text, start, end in encoded.special if marked[start:end].strip() != text.strip()]
        if not forged:
            return encoded.token_ids
        marked = _break_up(marked, forged)
    raise InvalidRequest("prompt", "spells out special tokens that cannot be told from text")


def _break_up(marked: str, spans: list[tuple[int, int]]) -> str:
    """`marked` with `BREAK` after the first character of each span, not counting the space a token may take in."""
    pieces, done = [], 0
    for start, end in spans:
        cut = end - len(marked[start:end].lstrip()) + 1
        pieces += [marked[done:cut], BREAK]
        done = cut
    return "".join([*pieces, marked[done:]])


def _is_letter(character: str) -> bool:
    return character.isalnum()


def _is_in_tags(character: str) -> bool:
    return character in "<>/"


def _key_characters(texts: list[str], avoid: Sequence[Callable[[str], bool]]) -> list[str]:
    """A few characters of which each text has at least one; what `avoid` names first is taken last."""
    keys: list[str] = []
    while texts:
        counts = Counter(character for text in texts for character in set(text) if not character.isspace())
        best = max(counts, key=lambda c: (*(not avoided(c) for avoided in avoid), counts[c], c))
        keys.append(best)
        texts = [text for text in texts if best not in text]
    return keys
