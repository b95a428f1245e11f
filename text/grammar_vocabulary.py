"""The tokens of a model as llguidance reads them."""

from __future__ import annotations

import contextlib
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from core.errors import InvalidRequest
from text.tokenizer import ModelTokenizer


class _Vocabulary(TokenizerWrapper):
    """The tokens of a `ModelTokenizer`, as llguidance wants them. Texts that a grammar forces get canonical tokens."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._own = tokenizer
        special = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self.tokens = [
            b"\xff" + special[token_id].encode() if token_id in special else tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.info.vocab_size)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids whose bytes are those of `text`."""
        raw = text if isinstance(text, bytes) else text.encode()
        readable = raw.decode(errors="replace")
        with contextlib.suppress(InvalidRequest):  # of texts that are no prompt
            token_ids = self._own.encode(readable, add_special=False, parse_special=False)
            if b"".join(self.tokens[token_id] for token_id in token_ids) == raw:  # some models put a space before it
                return token_ids
        return [] if self.greedy is None else list(self.greedy.greedy_tokenize(readable))


def make_ll_tokenizer(tokenizer: ModelTokenizer) -> LLTokenizer:
    vocabulary: Any = _Vocabulary(tokenizer)
    made = LLTokenizer(vocabulary, n_vocab=tokenizer.info.vocab_size, eos_token=sorted(tokenizer.eos_token_ids))
    vocabulary.greedy = made
    return made
