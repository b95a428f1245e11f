"""Converts token ids to text, in runs of any length, in whole characters.

In every tokenizer that Tandem serves, the bytes of a token do not depend on its neighbours. So the text is the UTF-8
decoding of the joined bytes of the tokens. An incremental decoder returns each character with its last byte. Invalid
bytes become U+FFFD, at the same places as when all bytes are decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

DetokenizerState = tuple[tuple[bytes, int], bool]
TokenBytes = Callable[[int], bytes]  # token id -> its bytes; b"" for a token that has no text


def decode_tokens(token_ids: Sequence[int], token_bytes: TokenBytes, *, strip_first_space: bool = False) -> str:
    """The text of all tokens, without its first character if that is a space and `strip_first_space` is set."""
    text = b"".join(map(token_bytes, token_ids)).decode("utf-8", errors="replace")
    return text.removeprefix(" ") if strip_first_space else text


class IncrementalDetokenizer:
    """Call `push` for all ids in order, then `flush`. The joined texts equal the result of `decode_tokens`."""

    def __init__(self, token_bytes: TokenBytes, *, strip_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next_space = strip_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        return self._delta(self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def save(self) -> DetokenizerState:
        """The state, for `restore`."""
        return self._decoder.getstate(), self._strip_next_space

    def restore(self, state: DetokenizerState) -> None:
        decoder_state, self._strip_next_space = state
        self._decoder.setstate(decoder_state)

    def flush(self) -> str:
        """The rest of the text: U+FFFD if the last character is incomplete, else nothing."""
        return self._delta(self._decoder.decode(b"", final=True))

    def _delta(self, text: str) -> str:
        if self._strip_next_space and text:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text
