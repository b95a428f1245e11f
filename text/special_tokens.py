"""Encodes a chat so that only the chat template, and no message, can produce a special token.

    contents --mark--> template --> marked prompt --restore--> text --codec--> token ids
                                          |                                       |
                                          +--- is the text of each special token unmarked? ---+

`Marks` replaces a few key characters of the content by stand-ins of equal length. The text of each special token
contains a key character. So a special token without a stand-in in its text comes from the template, even if the
template trims, cuts, repeats or joins content. A special token with a stand-in comes from content: `BREAK` goes into
its text, and the codec splits the text there and drops `BREAK`. Other prompts are encoded unchanged, in one piece.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import ConfigError, InvalidRequest

BREAK = "\ufdd0"
_STAND_INS = tuple(map(chr, range(0xFDD1, 0xFDF0)))  # noncharacters, which Unicode reserves for internal use, as BREAK
_MAX_ROUNDS = 4
_RESERVED = re.compile("[\ufdd0-\ufdef]")


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    special: list[tuple[str, int, int]]  # (text of a special token, its start, its end) in the input


class Codec(Protocol):
    """The interface of a tokenizer."""

    strip_first_space: bool

    def encode(self, text: str, add_special: bool, cache_salt: str = "") -> Encoded:
        """Token ids of `text`, with its special tokens recognised. No token contains `BREAK`.

        Calls with equal salts may share cached work. Several threads may call it at the same time.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def special_tokens(self) -> dict[str, int]: ...


class Marks:
    """Replaces key characters by stand-ins, and back. The text of each special token contains a key character."""

    def __init__(self, keys: Iterable[str]) -> None:
        # A template may change the case of content.
        cased = dict.fromkeys(form for key in keys for form in (key, key.lower(), key.upper()) if len(form) == 1)
        if len(cased) > len(_STAND_INS):
            raise ConfigError(
                f"the tokenizer's special tokens share too few characters: marking them needs {len(cased)} stand-ins, "
                f"at most {len(_STAND_INS)}"
            )
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
    """Ways to mark content, the preferred one first. A template that searches content for "</think>" needs the second.

    Raises `ConfigError` if the special tokens need more key characters than there are stand-ins.
    """
    texts = [text for text in special_texts if text.strip()]
    first, second = _key_characters(texts, (_is_letter, _is_in_tags)), _key_characters(texts, (_is_in_tags, _is_letter))
    return [Marks(first)] if first == second else [Marks(first), Marks(second)]


def refuse_reserved(field: str, text: str) -> None:
    """Raises `InvalidRequest` if `text` contains `BREAK` or a stand-in."""
    found = None if text.isascii() else _RESERVED.search(text)
    if found:
        raise InvalidRequest(
            field, f"must not contain the noncharacters U+FDD0 to U+FDEF, contains U+{ord(found[0]):04X}"
        )


def encode_framed(codec: Codec, marks: Marks, marked: str, add_special: bool, cache_salt: str) -> list[int]:
    """Token ids of a marked prompt. Only text without a stand-in becomes a special token."""
    for _ in range(_MAX_ROUNDS):
        encoded = codec.encode(marks.restore(marked), add_special, cache_salt)
        forged = [(start, end) for text, start, end in encoded.special if marked[start:end].strip() != text.strip()]
        if not forged:
            return encoded.token_ids
        marked = _break_up(marked, forged)
    raise InvalidRequest("prompt", "contains text of special tokens that cannot be encoded as plain text")


def _break_up(marked: str, spans: list[tuple[int, int]]) -> str:
    """`marked` with `BREAK` after the first character of each span that is not a space."""
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
    """A few characters, at least one from each text; characters that match a test of `avoid` only if no others do."""
    keys: list[str] = []
    while texts:
        counts = Counter(character for text in texts for character in set(text) if not character.isspace())
        best = max(counts, key=lambda c: (*(not avoided(c) for avoided in avoid), counts[c], c))
        keys.append(best)
        texts = [text for text in texts if best not in text]
    return keys
