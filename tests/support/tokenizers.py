"""Small tokenizers of every family, read from files as those of a model are. `MAKERS` write into a directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from model_files.model_source import ModelSource, SourceKind
from text.tokenizer_files import TokenizerFiles, from_directory, from_gguf

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<s>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPACES = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]


def smollm_gguf(directory: Path) -> TokenizerFiles:
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*ALPHABET, "an", *SPECIAL]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["a n"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return from_gguf(ModelSource("test", SourceKind.GGUF, path))


def byte_level(directory: Path) -> TokenizerFiles:
    return in_directory(directory, byte_level_tokenizer())


def sentencepiece(directory: Path) -> TokenizerFiles:
    return in_directory(directory, sentencepiece_tokenizer(normalizers.Sequence(_SPACES), None))


def metaspace(directory: Path) -> TokenizerFiles:
    """Marks the first word of a text, and no other."""
    return in_directory(directory, sentencepiece_tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="first")))


def normalized(directory: Path) -> TokenizerFiles:
    """Recognises special tokens after normalization, which may turn other characters into those of a special token."""
    return in_directory(directory, sentencepiece_tokenizer(normalizers.NFKC(), None), normalized=True)


MAKERS = [smollm_gguf, byte_level, sentencepiece, metaspace, normalized]


def byte_level_tokenizer(added: Iterable[AddedToken] = ()) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab={text: index for index, text in enumerate([*ALPHABET, "an"])}, merges=[("a", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece_tokenizer(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def in_directory(directory: Path, tokenizer: Tokenizer, normalized: bool = False) -> TokenizerFiles:
    """Adds the tokens of `SPECIAL`, writes the files, and reads them."""
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=normalized, rstrip=text == "<|user|>") for text in SPECIAL]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({}))
    return from_directory(ModelSource("test", SourceKind.HUGGING_FACE, directory))
