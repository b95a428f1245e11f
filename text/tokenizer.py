"""Converts text to token ids and back, for one model. Imports no torch, because the router uses it.

The chat template of the model renders a chat and writes its special tokens. The text of a special token in a message
stays plain text (`text/special_tokens.py`), unless the caller sets `parse_special`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken

from core.errors import InvalidRequest
from core.model_info import ModelInfo
from model_files.builtin_configs import BYTE_SPECIAL_TOKENS
from model_files.model_source import SourceKind, describe, resolve_model
from text.chat_template import ChatTemplate
from text.detokenizer import IncrementalDetokenizer, decode_tokens
from text.special_tokens import BREAK, Codec, Encoded, Marks, encode_framed, markings, refuse_reserved
from text.tokenizer_files import TokenizerFiles, byte_level_bytes, from_directory, from_gguf, sentencepiece_bytes

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelTokenizer:
    """The tokenizer of one model. Several threads may call it at the same time."""

    def __init__(self, info: ModelInfo, codec: Codec, template: ChatTemplate | None) -> None:
        self.info = info
        self._codec = codec
        self._template = template
        self._markings = markings(codec.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.info.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that structure a prompt and have no text in an output."""
        return self._codec.special_tokens

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds the tokens that the model expects before a text (e.g. bos).

        With `parse_special`, the text of a special token becomes that token; else it is plain text. Raises
        `InvalidRequest` for reserved noncharacters (`refuse_reserved`).
        """
        refuse_reserved("text", text)
        if parse_special:
            return self._codec.encode(text, add_special).token_ids
        marks = self._markings[0]
        return encode_framed(self._codec, marks, marks.mark(text), add_special)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], parse_special: bool = False) -> list[int]:
        """Token ids of the prompt for `messages` ({role, content} each). The caller checks the roles.

        With `parse_special`, the text of a special token in a message becomes that token; else it is plain text.
        Raises `InvalidRequest` as `render_chat` does, and for reserved noncharacters (`refuse_reserved`).
        """
        for index, message in enumerate(messages):
            refuse_reserved(f"messages[{index}].content", str(message.get("content")))
        if parse_special:
            return self._codec.encode(self.render_chat(messages), add_special=False).token_ids
        marked, marks = self._render_marked(messages)
        return encode_framed(self._codec, marks, marked, add_special=False)

    def _render_marked(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, Marks]:
        """The prompt with marked content, from the first marking under which the template treats content as before.

        If every marking changes the result, because the template searches content for key characters, the last one is
        used: a changed prompt is better than a forged special token.
        """
        rendered = plain = self.render_chat(messages)
        for marks in self._markings:
            contents = [marks.mark(message["content"]) for message in messages]
            marked = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
            rendered = plain if marked == messages else self.render_chat(marked)
            if marks.restore(rendered) == plain:
                break
        return rendered, marks

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an output; special tokens have none. Raises `InvalidRequest` for an id outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest("token_ids", f"{token_id} is outside the vocabulary [0, {self.info.vocab_size})")
        return decode_tokens(token_ids, self._codec.token_bytes, strip_first_space=self._codec.strip_first_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, perhaps part of a character; empty for special tokens."""
        return self._codec.token_bytes(token_id)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new detokenizer, for one output."""
        return IncrementalDetokenizer(self._codec.token_bytes, strip_first_space=self._codec.strip_first_space)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of the prompt for `messages` ({role, content} each).

        Raises `InvalidRequest` if the model has no template, or if the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send text or token ids")
        return self._template.render(messages)


def load_tokenizer(spec: str, max_context: int = 0, cache_dir: Path | None = None) -> ModelTokenizer:
    """The tokenizer of a model spec. Raises `ModelNotFound`, or `ConfigError` for a tokenizer that is not supported."""
    source = resolve_model(spec, cache_dir)
    info = describe(source, max_context)
    if source.kind in (SourceKind.RANDOM, SourceKind.FAKE):
        return ModelTokenizer(info, ByteCodec(), ChatTemplate(BYTE_CHAT_TEMPLATE, {}))
    files = from_gguf(source) if source.kind is SourceKind.GGUF else from_directory(source)
    template = ChatTemplate(files.chat_template, files.template_tokens) if files.chat_template else None
    return ModelTokenizer(info, FileCodec(files), template)


class FileCodec:
    """The tokenizer from the files of a model."""

    def __init__(self, files: TokenizerFiles) -> None:
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

    def encode(self, text: str, add_special: bool) -> Encoded:
        encoding = self._files.tokenizer.encode(text, add_special_tokens=add_special)
        token_ids: list[int] = encoding.ids
        found = [index for index, token_id in enumerate(token_ids) if token_id in self._control]
        # Tokens that `add_special` added span no characters of the text.
        spans = [(token_ids[index], *(encoding.token_to_chars(index) or (0, 0))) for index in found]
        special = [(self._control[token_id], start, end) for token_id, start, end in spans if start < end]
        if BREAK in text:
            token_ids = [token_id for token_id in token_ids if token_id != self._break_id]
        return Encoded([*self._files.bos_prefix, *token_ids] if add_special else token_ids, special)

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


_BYTE_SPECIAL = re.compile("|".join(map(re.escape, BYTE_SPECIAL_TOKENS)))


def _utf8(text: str) -> list[int]:
    return list(text.replace(BREAK, "").encode("utf-8", errors="replace"))


class ByteCodec:
    """The tokenizer of random and fake models. Ids below 256 are bytes, then come the special tokens. The text of every
    other id is `<id>`."""

    strip_first_space = False

    def encode(self, text: str, add_special: bool) -> Encoded:
        del add_special  # these models expect no token before a text
        token_ids: list[int] = []
        special = []
        done = 0
        for match in _BYTE_SPECIAL.finditer(text):
            token_ids += _utf8(text[done : match.start()])
            token_ids.append(BYTE_SPECIAL_TOKENS[match[0]])
            special.append((match[0], match.start(), match.end()))
            done = match.end()
        return Encoded(token_ids + _utf8(text[done:]), special)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"" if token_id in BYTE_SPECIAL_TOKENS.values() else f"<{token_id}>".encode()

    @property
    def special_tokens(self) -> dict[str, int]:
        return dict(BYTE_SPECIAL_TOKENS)
