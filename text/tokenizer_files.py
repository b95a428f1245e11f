"""Reads a tokenizer from the files of a model: GGUF metadata or a Hugging Face directory.

Two families are supported. They differ in the conversion of the text of a token to bytes:

    byte-level    each byte is one printable character (the alphabet of GPT-2)
    sentencepiece a space is U+2581, and a byte outside any character is <0xNN>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from core.errors import ConfigError, TandemError
from model_files.end_tokens import special_texts
from model_files.fields import Fields, optional_file, read_json
from model_files.gguf_file import GGUFFile
from model_files.model_source import ModelSource


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    tokenizer: Tokenizer
    byte_level: bool  # else sentencepiece
    strip_first_space: bool
    added_tokens: Mapping[int, str]  # id -> text, for tokens with text in neither alphabet
    special_ids: frozenset[int]  # the added tokens that have no text in an output
    bos_prefix: tuple[int, ...]  # ids that `add_special` puts before a text; empty if the tokenizer itself adds them
    chat_template: str | None
    tool_template: str | None  # for chats with tools; None = as the others
    template_tokens: Mapping[str, str]  # values of bos_token, eos_token and others, which the template may use


@contextmanager
def library_errors(as_error: Callable[[str], TandemError]) -> Iterator[None]:
    """Raise `as_error(message)` for every exception of the library, which has no narrower type.

    A panic of its Rust code is no `Exception`: nothing between here and the end of the process would catch it.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise as_error(str(error)) from error
        raise


# ---- GGUF

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


# tokenizer.ggml.pre -> the steps that split a text before merging; absent means gpt-2
_GGUF_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def from_gguf(source: ModelSource) -> TokenizerFiles:
    """The byte-level BPE in a GGUF file. Raises `ConfigError` for a tokenizer that is not supported."""
    assert source.path is not None
    file = GGUFFile(source.path)
    fields = file.fields
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f"{source.path}: tokenizer {model!r} in GGUF is not supported; use the Hugging Face directory of the model"
        )
    pre = fields.text("tokenizer.ggml.pre", "gpt-2")
    if pre == "default":
        pre = "gpt-2"
    if pre not in _GGUF_PRE_TOKENIZERS:
        raise ConfigError(
            f"{source.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_GGUF_PRE_TOKENIZERS)}"
        )
    texts = fields.list_of(str, "tokenizer.ggml.tokens")
    kinds = fields.list_of(int, "tokenizer.ggml.token_type", [1] * len(texts))
    if len(kinds) != len(texts):
        raise ConfigError(
            f"{source.path}: tokenizer.ggml.token_type has {len(kinds)} items, tokenizer.ggml.tokens has {len(texts)}"
        )
    # Llama 3 uses a whole word that is in the vocabulary, even if no merges lead to the word.
    tokenizer = Tokenizer(_gguf_bpe(fields, texts, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_GGUF_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    added = {index: texts[index] for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for index, text in added.items() if kinds[index] == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for index, text in added.items() if kinds[index] == _USER_DEFINED]
    )
    ids = {
        name: fields.integer(key, least=0, most=len(texts) - 1)
        for name in ("bos", "eos")
        if (key := f"tokenizer.ggml.{name}_token_id") in fields
    }
    adds_bos = fields.flag("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos" in ids
    return TokenizerFiles(
        tokenizer=tokenizer,
        byte_level=True,
        strip_first_space=False,
        added_tokens=added,
        special_ids=frozenset(index for index in added if kinds[index] == _CONTROL),
        bos_prefix=(ids["bos"],) if adds_bos else (),
        chat_template=fields.optional_text("tokenizer.chat_template"),
        tool_template=fields.optional_text("tokenizer.chat_template.tool_use"),
        template_tokens={f"{name}_token": texts[index] for name, index in ids.items()},
    )


def _gguf_bpe(fields: Fields, texts: list[str], ignore_merges: bool) -> BPE:
    key = "tokenizer.ggml.merges"
    merges = []
    for merge in fields.list_of(str, key):
        left, separator, right = merge.partition(" ")
        if not separator:
            raise ConfigError(f"{fields.origin}: {key} has {merge!r}, must have two tokens with a space between them")
        merges.append((left, right))
    unfit = f"{fields.origin}: {key} does not fit tokenizer.ggml.tokens"
    with library_errors(lambda message: ConfigError(f"{unfit}: {message}")):
        return BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges, ignore_merges=ignore_merges)


# ---- Hugging Face

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def from_directory(source: ModelSource) -> TokenizerFiles:
    """The tokenizer from tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises `ConfigError`."""
    assert source.path is not None
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{source.path} has no tokenizer.json: save the model's tokenizer beside its weights")
    raw = Fields(read_json(path), "tokenizer.json")
    with library_errors(lambda message: ConfigError(f"cannot read {path}: {message}")):
        tokenizer = Tokenizer.from_file(str(path))
    # Truncation and padding, meant for training, would change a prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    byte_level, strip_first_space = _decoder_family(raw.section("decoder").values, source)
    options = optional_file(source.path / "tokenizer_config.json")
    named = special_texts(options, _SPECIAL_NAMES)
    added = tokenizer.get_added_tokens_decoder()
    templates = _directory_templates(source.path, options)
    return TokenizerFiles(
        tokenizer=tokenizer,
        byte_level=byte_level,
        strip_first_space=strip_first_space,
        added_tokens={index: token.content for index, token in added.items()},
        special_ids=frozenset(
            index for index, token in added.items() if token.special or token.content in named.values()
        ),
        bos_prefix=(),  # the post-processor in tokenizer.json adds it
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        template_tokens={"bos_token": "", "eos_token": ""} | named,
    )


def _decoder_family(decoder: Mapping[str, Any], source: ModelSource) -> tuple[bool, bool]:
    """(True for byte-level and False for sentencepiece, True if the text loses its first space)"""
    steps = decoder.get("decoders", [decoder])  # the library has read the file, so the types are right
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return True, False
    if "ByteFallback" in kinds:
        strips = any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
        return False, strips or "Metaspace" in kinds
    raise ConfigError(
        f"{source.path}: a tokenizer with the decoders {kinds} is not supported; supported: ByteLevel, ByteFallback"
    )


def _directory_templates(path: Path, options: Fields) -> dict[str, str]:
    """The chat templates by name. Files win over tokenizer_config.json, as in transformers."""
    several = options.values.get("chat_template")
    if isinstance(several, list):
        entries = [Fields({"entry": entry}, f"{options.origin}'s chat_template").section("entry") for entry in several]
        found = {named.text("name"): named.text("template") for named in entries}
    else:
        found = {"default": options.text("chat_template")} if "chat_template" in options else {}
    files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    for name, place in files.items():
        if (path / place).is_file():
            try:
                found[name] = (path / place).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read {path / place}: {error}") from error
    return found


# ---- bytes of a token


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of GPT-2: printable Latin-1 is itself, and the other bytes are U+0100 and following, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def byte_level_bytes(text: str) -> bytes:
    alphabet = _byte_of_character()
    try:
        return bytes(alphabet[character] for character in text)
    except KeyError:  # an added token, outside the alphabet
        return text.encode("utf-8")


def sentencepiece_bytes(text: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode("utf-8")
