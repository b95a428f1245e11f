"""Cuts a text into pieces that have, one by one, the tokens of the whole text.

    <|im_start|>system\nBe brief.<|im_end|>\n | <|im_start|>user\nWhat is ...<|im_end|>\n | <|im_start|>assistant\n
                                              ^ a cut                                     ^ a cut

A tokenizer first finds its added tokens in the raw text, each time the leftmost, and then handles the text between two
of them alone. A cut before a special token changes nothing if the tokenizer finds that token whatever its neighbours
are. `cut_tokens` selects such tokens; for a tokenizer without any, the whole text is one piece.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tokenizers import AddedToken

# A piece is at least this long: a cut costs more than the tokens of a shorter text.
MIN_PIECE_CHARS = 512
# The time to search a text grows with the number of tokens, and a tokenizer may have thousands.
MAX_CUT_TOKENS = 32


@dataclass(slots=True)
class Piece:
    text: str
    start: int  # of the piece in the whole text
    special: list[tuple[str, int, int]] = field(default_factory=list)  # the cut tokens in it: text, start, end


class Cutter:
    def __init__(self, cut_tokens: Iterable[str], min_piece_chars: int = MIN_PIECE_CHARS) -> None:
        """`cut_tokens` come from the function of that name. The first `MAX_CUT_TOKENS` are used."""
        used = list(cut_tokens)[:MAX_CUT_TOKENS]
        self._pattern = re.compile("|".join(map(re.escape, used))) if used else None
        self._min_piece_chars = min_piece_chars

    def cut(self, text: str) -> list[Piece]:
        """At least one piece. A text that grows at its end changes the last piece only, or adds pieces behind it."""
        pieces: list[Piece] = []
        start, special = 0, list[tuple[str, int, int]]()
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() - start >= self._min_piece_chars:
                pieces.append(Piece(text[start : match.start()], start, special))
                start, special = match.start(), []
            special.append((match[0], *match.span()))
        return [*pieces, Piece(text[start:], start, special)]


def cut_tokens(added: Collection[AddedToken], special_texts: Collection[str]) -> list[str]:
    """The texts of `special_texts` that the tokenizer finds everywhere, whatever stands before or after.

    `added` are all added tokens of the tokenizer. The conditions on a text T:

    - The tokenizer searches T in the raw text, not in normalized text, and T neither takes spaces before it (`lstrip`)
      nor depends on its neighbours (`single_word`).
    - No added token contains the first character of T behind its own first character. So no token that starts before T
      reaches into T.
    - No other added token starts with T. So the tokenizer always finds T itself, not a longer token.
    - T starts with neither a letter, digit nor underscore. So a token before T that must be a word (`single_word`) is
      one beside T as at the end of a text. T starts with no space either, which a token before T might take (`rstrip`).
    """
    inside = {character for token in added for character in token.content[1:]}
    ordered = sorted(token.content for token in added)
    longer_exists = {text for text, following in pairwise(ordered) if following.startswith(text)}
    return [
        token.content
        for token in added
        if token.content in special_texts
        and not (token.normalized or token.lstrip or token.single_word)
        and not token.content[0].isspace()
        and not re.match(r"\w", token.content)
        and token.content[0] not in inside
        and token.content not in longer_exists
    ]
