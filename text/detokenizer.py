"""Converts token ids to text, in runs of any length, in whole characters.

In every tokenizer that Tandem serves, the bytes of a token do not depend on its neighbours. So the text is the UTF-8
decoding of the joined bytes of the tokens. An incremental decoder returns each character with its last byte. Invalid
bytes become U+FFFD, at the same places as when all bytes are decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from core.errors import InvalidRequest

MAX_TEXT_CHARS = 8 * 1024 * 1024
TOKENS_PER_STEP = 4096  # so that the bytes of a million tokens never lie in as many objects
DetokenizerState = tuple[bytes, int]
TokenBytes = Callable[[int], bytes]  # token id -> its bytes; b"" for a token that has no text


class IncrementalDetokenizer:
    """Call `push` for all ids of an output in order, then `flush`. The joined texts equal that of `decode_tokens`.

    An output continues a prompt, so its first space stays: sentencepiece strips that of a whole text only.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def save(self) -> DetokenizerState:
        """The state, for `restore`."""
        return self._decoder.getstate()

    def restore(self, state: DetokenizerState) -> None:
        self._decoder.setstate(state)

    def flush(self) -> str:
        """The rest of the text: U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


def decode_tokens(token_ids: Sequence[int], token_bytes: TokenBytes, *, strip_first_space: bool = False) -> str:
    """The text of all tokens, without its first character if that is a space and `strip_first_space` is set.

    `token_ids` may come from a client, who names a long token a million times. Raises `InvalidRequest` for a text of
    more than `MAX_TEXT_CHARS`.
    """
    detokenizer, pieces, num_chars = IncrementalDetokenizer(token_bytes), list[str](), 0
    for at in range(0, len(token_ids), TOKENS_PER_STEP):
        pieces.append(detokenizer.push(token_ids[at : at + TOKENS_PER_STEP]))
        num_chars += len(pieces[-1])
        if num_chars > MAX_TEXT_CHARS:
            raise InvalidRequest("token_ids", f"must stand for a text of at most {MAX_TEXT_CHARS} characters")
    text = "".join([*pieces, detokenizer.flush()])
    return text.removeprefix(" ") if strip_first_space else text
