"""The tokens that end an output: all that any file of a model declares, and those whose name ends a turn.

A fine-tune for chats often ends a turn with another token than its base, and declares that token in one file only, or
in none: config.json, or the header of a GGUF file, still has the end of a document. So the sources are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from core.errors import ConfigError
from model_files.fields import Fields, optional_file

# The end of a turn or of a call of a tool, as llama.cpp knows them. Special tokens only.
_TURN_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<|end_of_turn|>", "<end_of_utterance>",
})  # fmt: skip
_SPECIAL_KINDS = (3, 4)  # control and user-defined: tokenizer.ggml.token_type
_GGUF_KEYS = ("eos", "eot", "eom")


def ends_of_gguf(fields: Fields, vocab_size: int) -> frozenset[int]:
    """Raises `ConfigError` for an id outside the vocabulary."""
    declared = {
        token_id for name in _GGUF_KEYS for token_id in fields.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size)
    }
    texts = fields.list_of(str, "tokenizer.ggml.tokens", [])
    kinds = fields.list_of(int, "tokenizer.ggml.token_type", [])
    special = {texts[index]: index for index, kind in enumerate(kinds[: len(texts)]) if kind in _SPECIAL_KINDS}
    return frozenset(declared | _turn_ends(special))


def ends_of_directory(path: Path, vocab_size: int) -> frozenset[int]:
    """Raises `ConfigError` for an id in config.json or generation_config.json outside the vocabulary."""
    declared = {
        token_id
        for name in ("config.json", "generation_config.json")
        for token_id in optional_file(path / name).token_ids("eos_token_id", vocab_size)
    }
    options = optional_file(path / "tokenizer_config.json")
    named = special_texts(options, ("eos_token",)).values()
    # A tokenizer may have more tokens than the model, which never draws those.
    added = [(text, index, special) for text, index, special in _added_tokens(path, options) if index < vocab_size]
    special = {text: index for text, index, special in added if special}
    return frozenset(declared | {index for text, index, _ in added if text in named} | _turn_ends(special))


def special_texts(options: Fields, names: tuple[str, ...]) -> dict[str, str]:
    """Name -> text, of those tokens among `names` that tokenizer_config.json has."""
    found = {}
    for name in names:
        if isinstance(options.values.get(name), Mapping):
            found[name] = options.section(name).text("content", "")
        elif name in options:
            found[name] = options.text(name)
    return found


def _turn_ends(special: Mapping[str, int]) -> set[int]:
    """`special`: text -> id. Where <|return|> ends a turn, <|end|> ends a message within it."""
    names = _TURN_ENDS - {"<|end|>"} if "<|return|>" in special else _TURN_ENDS
    return {special[text] for text in names & special.keys()}


def _added_tokens(path: Path, options: Fields) -> Iterator[tuple[str, int, bool]]:
    """(text, id, whether it is special). tokenizer.json is read only if needed: it has the whole vocabulary."""
    listed = options.section("added_tokens_decoder")
    for index in listed.values:
        token = listed.section(index)
        if not index.isdecimal():
            raise ConfigError(f"{listed.origin}: {index!r} must be a token id")
        yield token.text("content"), int(index), token.flag("special")
    if listed.values:
        return
    tokenizer = optional_file(path / "tokenizer.json")
    entries = tokenizer.values.get("added_tokens") or []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        token = Fields({"entry": entry}, f"{tokenizer.origin}'s added_tokens[{number}]").section("entry")
        yield token.text("content"), token.integer("id", least=0), token.flag("special")
