"""Converts text to token ids and back, for one model. Imports no torch, because the router uses it.

The chat template of the model renders a chat and writes its special tokens. The text of a special token in a message
stays plain text (`text/special_tokens.py`), unless the caller sets `parse_special`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from core.errors import InvalidRequest
from core.model_info import ModelInfo
from model_files.builtin_configs import BYTE_SPECIAL_TOKENS
from model_files.model_source import SourceKind, describe, resolve_model
from text.chat import Chat, Message
from text.chat_template import ChatTemplate
from text.detokenizer import IncrementalDetokenizer, decode_tokens
from text.file_codec import FileCodec
from text.special_tokens import BREAK, Codec, Encoded, Marks, encode_framed, markings, refuse_reserved
from text.tokenizer_files import from_directory, from_gguf
from text.tool_formats import FORMATS

# ChatML, with tools in the style of Hermes.
BYTE_CHAT_TEMPLATE = (
    "{% set has_system = tools and messages[0].role == 'system' %}"
    "{% if tools %}<|im_start|>system\n{% if has_system %}{{ messages[0].content }}\n\n{% endif %}"
    "Tools: <tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    'Call a tool: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in (messages[1:] if has_system else messages) %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    '{% for call in message.tool_calls or [] %}\n<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelTokenizer:
    """The tokenizer of one model. Several threads may call it at the same time."""

    def __init__(
        self, info: ModelInfo, codec: Codec, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """`tool_template`: of chats with tools; None = `template`."""
        self.info = info
        self._codec = codec
        self._template = template
        self._tool_template = tool_template or template
        self._markings = markings(codec.special_tokens)
        self._special_names = {token_id: text.encode() for text, token_id in codec.special_tokens.items()}
        form = FORMATS.get(self.tool_format)
        tags = () if form is None else (form.tag, form.end)
        self._tags = {token_id: text.encode() for text, token_id in codec.special_tokens.items() if text in tags}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def knows_tools(self) -> bool:
        """The chat template shows tools to the model."""
        return self._tool_template is not None and self._tool_template.knows_tools

    @property
    def tool_format(self) -> str:
        """How the model writes calls of tools (GetModelResponse.tool_format)."""
        return "" if self._tool_template is None else self._tool_template.tool_format

    @property
    def reserved_options(self) -> frozenset[str]:
        """Variables of the chat templates that no option may set."""
        return frozenset().union(*(made.reserved for made in (self._template, self._tool_template) if made))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.info.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that structure a prompt and have no text in an output."""
        return self._codec.special_tokens

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = True, cache_salt: str = ""
    ) -> list[int]:
        """Token ids of `text`. `add_special` adds the tokens that the model expects before a text (e.g. bos).

        With `parse_special`, the text of a special token becomes that token; else it is plain text. Calls with equal
        salts share cached pieces. Raises `InvalidRequest` for reserved noncharacters (`refuse_reserved`).
        """
        refuse_reserved("text", text)
        if parse_special:
            return self._codec.encode(text, add_special, cache_salt).token_ids
        marks = self._markings[0]
        return encode_framed(self._codec, marks, marks.mark(text), add_special, cache_salt)

    def encode_chat(
        self, chat: Chat | Sequence[Message], parse_special: bool = False, cache_salt: str = ""
    ) -> list[int]:
        """Token ids of the prompt for a chat, or for messages ({role, content} each). The caller checks the roles.

        With `parse_special`, the text of a special token in a message becomes that token; else it is plain text. The
        same holds for the texts of tools and of their calls.
        Calls with equal salts share cached pieces. Raises `InvalidRequest` as `render_chat` does, and for reserved
        noncharacters (`refuse_reserved`).
        """
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        for field, text in chat.texts():
            refuse_reserved(field, text)
        if parse_special:
            return self._codec.encode(self.render_chat(chat), False, cache_salt).token_ids
        marked, marks = self._render_marked(chat)
        return encode_framed(self._codec, marks, marked, False, cache_salt)

    def _render_marked(self, chat: Chat) -> tuple[str, Marks]:
        """The prompt with marked content, from the first marking under which the template treats content as before.

        If every marking changes the result, because the template searches content for key characters, the last one is
        used: a changed prompt is better than a forged special token.
        """
        rendered = plain = self.render_chat(chat)
        texts = "".join(text for _, text in chat.texts())
        for marks in self._markings:
            rendered = plain if marks.mark(texts) == texts else self.render_chat(chat.changed(marks.mark))
            if marks.restore(rendered) == plain:
                break
        return rendered, marks

    def decode(self, token_ids: Sequence[int], with_special: bool = False) -> str:
        """The text of tokens. Special tokens have none, unless `with_special`.

        Raises `InvalidRequest` for an id outside the vocabulary, and as `decode_tokens`.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest("token_ids", f"{token_id} is outside the vocabulary [0, {self.info.vocab_size})")
        token_bytes = self.token_name if with_special else self._codec.token_bytes
        return decode_tokens(token_ids, token_bytes, strip_first_space=self._codec.strip_first_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, perhaps part of a character; empty for special tokens."""
        return self._codec.token_bytes(token_id)

    def token_name(self, token_id: int) -> bytes:
        """As `token_bytes`; for a special token, its name."""
        return self._codec.token_bytes(token_id) or self._special_names.get(token_id, b"")

    def detokenizer(self, with_tags: bool = False) -> IncrementalDetokenizer:
        """A new detokenizer, for one output. `with_tags`: special tokens that are tags of calls have their text."""
        return IncrementalDetokenizer(self._tagged_bytes if with_tags and self._tags else self._codec.token_bytes)

    def _tagged_bytes(self, token_id: int) -> bytes:
        return self._tags.get(token_id) or self._codec.token_bytes(token_id)

    def render_chat(self, chat: Chat | Sequence[Message]) -> str:
        """The text of the prompt for a chat, or for messages ({role, content} each).

        Raises `InvalidRequest` if the model has no template, or if the template refuses the messages.
        """
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        template = self._tool_template if chat.uses_tools else self._template
        if template is None:
            raise InvalidRequest("messages", "this model has no chat template; send text or token ids")
        return template.render(chat)


def load_tokenizer(
    spec: str, max_context: int = 0, cache_dir: Path | None = None, own_engine: bool = True
) -> ModelTokenizer:
    """The tokenizer of a model spec. Raises `ModelNotFound`, or `ConfigError` for a tokenizer that is not supported.

    `own_engine`: raise `ConfigError` for a model that Tandem's own engine cannot compute, too.
    """
    source = resolve_model(spec, cache_dir)
    info = describe(source, max_context, own_engine)
    if source.kind in (SourceKind.RANDOM, SourceKind.FAKE):
        return ModelTokenizer(info, ByteCodec(), ChatTemplate(BYTE_CHAT_TEMPLATE, {}))
    files = from_gguf(source) if source.kind is SourceKind.GGUF else from_directory(source)
    template, tool_template = (
        ChatTemplate(source_text, files.template_tokens) if source_text else None
        for source_text in (files.chat_template, files.tool_template)
    )
    return ModelTokenizer(info, FileCodec(files), template, tool_template)


_BYTE_SPECIAL = re.compile("|".join(map(re.escape, BYTE_SPECIAL_TOKENS)))


def _utf8(text: str) -> list[int]:
    return list(text.replace(BREAK, "").encode("utf-8", errors="replace"))


class ByteCodec:
    """The tokenizer of random and fake models. Ids below 256 are bytes, then come the special tokens. The text of every
    other id is `<id>`."""

    strip_first_space = False

    def encode(self, text: str, add_special: bool, cache_salt: str = "") -> Encoded:
        del add_special, cache_salt  # these models expect no token before a text, and encoding takes no time
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
