"""Token ids to text, one at a time, never half a character.

Every tokenizer served here maps a token to bytes that do not depend on its neighbours, so text is the UTF-8 decoding
of the tokens' bytes in a row. Feeding them to an incremental decoder gives each character once, when its last byte has
come; bytes that can belong to no character become U+FFFD as soon as that is certain, as in decoding all at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]  # token id -> its bytes; b"" for a token that has no text


def decode_tokens(token_ids: Sequence[int], token_bytes: TokenBytes, *, strip_first_space: bool = False) -> str:
    """The text of all tokens. With `strip_first_space` a space that begins the text is not part of it."""
    text = b"".join(map(token_bytes, token_ids)).decode("utf-8", errors="replace")
    return text.removeprefix(" ") if strip_first_space else text


class IncrementalDetokenizer:
    """Feed ids with `push`; the deltas and the final `flush`, concatenated, are what `decode_tokens` gives."""

    def __init__(self, token_bytes: TokenBytes, *, strip_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next_space = strip_first_space

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished. Time: its own bytes'."""
        return self._delta(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never got whole, else nothing."""
        return self._delta(self._decoder.decode(b"", final=True))

    def _delta(self, text: str) -> str:
        if self._strip_next_space and text:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text
