"""The tokenizer from the files of a model.

Only the batch calls of the library release the interpreter lock: `Tokenizer.encode` holds the lock for all of a prompt,
and would stop the router's event loop for that time. So every call here is a batch.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tokenizers import AddedToken, Encoding

from core.errors import InvalidRequest
from text.piece_cache import PieceCache
from text.pieces import MIN_PIECE_CHARS, Cutter, Piece, cut_tokens
from text.special_tokens import BREAK, Encoded
from text.tokenizer_files import TokenizerFiles, byte_level_bytes, library_errors, sentencepiece_bytes

# The library would spread a batch over threads of its own, one for each core. The caller decides on the threads.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


class FileCodec:
    """A `text.special_tokens.Codec`."""

    def __init__(self, files: TokenizerFiles, min_piece_chars: int = MIN_PIECE_CHARS) -> None:
        self._files = files
        self._to_bytes = byte_level_bytes if files.byte_level else sentencepiece_bytes
        self._known: dict[int, bytes] = {}  # token id -> bytes, at most one entry for each id of the vocabulary
        self.strip_first_space = files.strip_first_space
        # `special_ids` may include spaces and newlines, which are always plain text.
        self._control = {
            token_id: files.added_tokens[token_id]
            for token_id in files.special_ids
            if files.added_tokens[token_id].strip()
        }
        files.tokenizer.add_tokens([AddedToken(BREAK, normalized=False)])
        self._break_id = files.tokenizer.token_to_id(BREAK)
        # The post-processor of some tokenizers puts tokens around the whole text.
        self._frames_texts = files.tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        added = files.tokenizer.get_added_tokens_decoder()
        cuts = cut_tokens(list(added.values()), set(self._control.values()))
        # Those that the chat template names come first: a prompt has no others, as a rule.
        templates = (files.chat_template or "") + (files.tool_template or "")
        cuts.sort(key=lambda text: text not in templates)
        self._cutter = Cutter(cuts, min_piece_chars)
        self.cache = PieceCache()
        self._cache_lock = threading.Lock()

    def encode(self, text: str, add_special: bool, cache_salt: str = "") -> Encoded:
        if add_special and self._frames_texts:
            with _encoding_errors():
                [encoding] = self._files.tokenizer.encode_batch([text], add_special_tokens=True)
            return Encoded(self._without_breaks(text, encoding.ids), self._special(encoding, start=0))
        pieces = self._cutter.cut(text)
        # The last piece is not kept: the next turn of a chat has a longer piece at this place.
        ids_of = self._cached(pieces[:-1], cache_salt)
        unknown = [piece for piece in pieces if piece.text not in ids_of]
        complete = self._encode_pieces(unknown, ids_of)
        self._keep([piece for piece in complete if piece is not pieces[-1]], ids_of, cache_salt)
        token_ids = [*self._files.bos_prefix] if add_special else []
        for piece in pieces:
            token_ids += ids_of[piece.text]
        special = [span for piece in pieces for span in piece.special]
        return Encoded(self._without_breaks(text, token_ids), special)

    def _encode_pieces(self, pieces: list[Piece], ids_of: dict[str, Sequence[int]]) -> list[Piece]:
        """Fill in the ids of `pieces`. Returns the pieces without any special token besides the cut tokens.

        The others get their special tokens from a second, slower call, which also finds the place of each token.
        """
        tokenizer = self._files.tokenizer
        complete = []
        texts = [piece.text for piece in pieces]
        with _encoding_errors():
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for piece, encoding in zip(pieces, encodings, strict=True):
            ids_of[piece.text] = token_ids = encoding.ids
            if sum(map(self._control.__contains__, token_ids)) == len(piece.special):
                complete.append(piece)
            else:
                with _encoding_errors():
                    [located] = tokenizer.encode_batch([piece.text], add_special_tokens=False)
                piece.special = self._special(located, piece.start)
        return complete

    def _special(self, encoding: Encoding, start: int) -> list[tuple[str, int, int]]:
        """The special tokens in a text that begins at `start`."""
        spans = []
        for index, token_id in enumerate(encoding.ids):
            if token_id in self._control:
                # Tokens that the post-processor added span no characters of the text.
                spans.append((self._control[token_id], *(encoding.token_to_chars(index) or (0, 0))))
        return [(text, start + first, start + end) for text, first, end in spans if first < end]

    def _without_breaks(self, text: str, token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id != self._break_id] if BREAK in text else token_ids

    def _cached(self, pieces: list[Piece], salt: str) -> dict[str, Sequence[int]]:
        with self._cache_lock:
            found = {piece.text: self.cache.get((salt, piece.text)) for piece in pieces}
        return {text: token_ids for text, token_ids in found.items() if token_ids is not None}

    def _keep(self, pieces: list[Piece], ids_of: dict[str, Sequence[int]], salt: str) -> None:
        packed = [((salt, piece.text), array("I", ids_of[piece.text])) for piece in pieces]
        with self._cache_lock:
            for key, token_ids in packed:
                self.cache.put(key, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read_bytes(token_id)
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._files.special_ids:
            return b""
        added = self._files.added_tokens.get(token_id)
        if added is not None:
            return added.encode("utf-8")
        # The vocabulary of a model may have more ids than its tokenizer. Those ids have no text.
        text = self._files.tokenizer.id_to_token(token_id)
        return b"" if text is None else self._to_bytes(text)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {self._files.added_tokens[token_id]: token_id for token_id in self._files.special_ids}


def _encoding_errors() -> AbstractContextManager[None]:
    """A tokenizer may lack a token for a text, or fail on some texts only."""
    return library_errors(lambda message: InvalidRequest("text", f"the model's tokenizer cannot encode it: {message}"))
