"""Text to token ids and back, for one model. Imports no torch: the router runs this, too.

A chat is rendered by the model's template and the result encoded with special tokens recognised, as the field does it.
So a message that spells out a special token gets that token; who must not allow that refuses such messages beforehand
(`special_tokens` lists them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from core.errors import InvalidRequest
from core.model_info import ModelInfo
from model_files.builtin_configs import BYTE_SPECIAL_TOKENS
from model_files.model_source import SourceKind, describe, resolve_model
from text.chat_template import ChatTemplate
from text.detokenizer import IncrementalDetokenizer, decode_tokens
from text.tokenizer_files import TokenizerFiles, byte_level_bytes, from_directory, from_gguf, sentencepiece_bytes

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Codec(Protocol):
    """What differs between tokenizers."""

    strip_first_space: bool

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def special_tokens(self) -> dict[str, int]: ...


class ModelTokenizer:
    """Safe to call from several threads at once."""

    def __init__(self, info: ModelInfo, codec: _Codec, template: ChatTemplate | None) -> None:
        self.info = info
        self._codec = codec
        self._template = template

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.info.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that structure a prompt and have no text in an answer."""
        return self._codec.special_tokens

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, special tokens recognised. `add_special` puts what the model expects before it (e.g. bos)."""
        return self._codec.encode(text, add_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer: special tokens have none. Raises `InvalidRequest` for an id outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest("token_ids", f"{token_id} is outside the vocabulary [0, {self.info.vocab_size})")
        return decode_tokens(token_ids, self._codec.token_bytes, strip_first_space=self._codec.strip_first_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, perhaps part of a character; empty for special tokens."""
        return self._codec.token_bytes(token_id)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh one for one answer."""
        return IncrementalDetokenizer(self._codec.token_bytes, strip_first_space=self._codec.strip_first_space)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for `messages` ({role, content} each); encode it with add_special=False.

        Raises `InvalidRequest` where the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send text or token ids")
        return self._template.render(messages)


def load_tokenizer(spec: str, max_context: int = 0, cache_dir: Path | None = None) -> ModelTokenizer:
    """The tokenizer of a model spec. Raises `ModelNotFound`, or `ConfigError` naming a kind that is not served."""
    source = resolve_model(spec, cache_dir)
    info = describe(source, max_context)
    if source.kind in (SourceKind.RANDOM, SourceKind.FAKE):
        return ModelTokenizer(info, ByteCodec(), ChatTemplate(BYTE_CHAT_TEMPLATE, {}))
    files = from_gguf(source) if source.kind is SourceKind.GGUF else from_directory(source)
    template = ChatTemplate(files.chat_template, files.template_tokens) if files.chat_template else None
    return ModelTokenizer(info, FileCodec(files), template)


class FileCodec:
    """A tokenizer that came with a model."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._to_bytes = byte_level_bytes if files.byte_level else sentencepiece_bytes
        self._known: dict[int, bytes] = {}  # token id -> bytes, at most one entry for each of the vocabulary
        self.strip_first_space = files.strip_first_space

    def encode(self, text: str, add_special: bool) -> list[int]:
        token_ids: list[int] = self._files.tokenizer.encode(text, add_special_tokens=add_special).ids
        return [*self._files.bos_prefix, *token_ids] if add_special else token_ids

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
        # A model's matrix may have more rows than its tokenizer has tokens; those say nothing.
        text = self._files.tokenizer.id_to_token(token_id)
        return b"" if text is None else self._to_bytes(text)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {self._files.added_tokens[token_id]: token_id for token_id in self._files.special_ids}


class ByteCodec:
    """Ids are bytes, then special tokens, then ids without text, written as `<id>`: for random and fake models."""

    strip_first_space = False

    def encode(self, text: str, add_special: bool) -> list[int]:
        del add_special  # these models expect nothing before a text
        token_ids: list[int] = []
        while text:
            found = [(text.find(special), special) for special in BYTE_SPECIAL_TOKENS if special in text]
            start, special = min(found, default=(len(text), ""))
            token_ids += text[:start].encode("utf-8", errors="replace")
            if special:
                token_ids.append(BYTE_SPECIAL_TOKENS[special])
            text = text[start + len(special) :]
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"" if token_id in BYTE_SPECIAL_TOKENS.values() else f"<{token_id}>".encode()

    @property
    def special_tokens(self) -> dict[str, int]:
        return dict(BYTE_SPECIAL_TOKENS)
