"""The tokenizer of a model leaves the interpreter lock to other threads, and does not tokenize known turns again."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from tests.support.tokenizers import SPECIAL, byte_level_tokenizer, in_directory, smollm_gguf
from text.file_codec import FileCodec
from text.tokenizer_files import TokenizerFiles

WORDS = "the cat sat on the mat and then another can ran " * 2000
TURNS = ["<|im_start|>system\n" + "be an an " * 100, "<|im_end|>\n<|im_start|>user\nhi" * 30, "<|im_end|>" + "n" * 600]


@pytest.fixture
def files(tmp_path: Path) -> TokenizerFiles:
    return smollm_gguf(tmp_path)


def in_one_call(files: TokenizerFiles, text: str) -> list[int]:
    token_ids: list[int] = files.tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


@pytest.mark.parametrize("add_special", [False, True])
def test_other_threads_run_while_a_long_prompt_is_tokenized(tmp_path: Path, add_special: bool) -> None:
    tokenizer = byte_level_tokenizer([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 260)])
    codec = FileCodec(in_directory(tmp_path, tokenizer))
    gate, ran = threading.Event(), threading.Event()

    def wait_and_run() -> None:
        gate.wait()
        ran.set()

    other = threading.Thread(target=wait_and_run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # so the other thread runs only if this thread gives the lock up
    try:
        gate.set()
        for _ in range(20):  # a busy machine may start the other thread late
            codec.encode(WORDS, add_special)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_the_turns_of_a_chat_are_tokenized_once(files: TokenizerFiles) -> None:
    codec = FileCodec(files)
    for end in range(1, len(TURNS) + 1):
        text = "".join(TURNS[:end])
        assert codec.encode(text, add_special=False).token_ids == in_one_call(files, text)
    assert codec.cache.num_hits > 0
    before = codec.cache.num_misses
    codec.encode("".join(TURNS), add_special=False)
    assert codec.cache.num_misses == before


def test_requests_with_different_salts_share_no_piece(files: TokenizerFiles) -> None:
    codec, text = FileCodec(files), "".join(TURNS)
    for salt in ("", "a", "b"):
        assert codec.encode(text, False, salt).token_ids == in_one_call(files, text)
    assert codec.cache.num_hits == 0


def test_a_text_without_a_safe_cut_is_not_cached(files: TokenizerFiles) -> None:
    codec = FileCodec(files)
    codec.encode(WORDS, add_special=False)
    assert codec.cache.num_bytes == 0


def test_a_piece_with_another_special_token_is_not_cached(tmp_path: Path) -> None:
    """The places of such tokens are not known without the tokenizer."""
    tokenizer = byte_level_tokenizer([AddedToken("<|pad|>", special=True, normalized=False, lstrip=True)])
    codec = FileCodec(in_directory(tmp_path, tokenizer))
    text = f"<|im_start|>a <|pad|>{'b' * 600}<|im_end|>"
    for _ in range(2):
        assert codec.encode(text, add_special=False).special == [
            ("<|im_start|>", 0, 12),
            ("<|pad|>", 13, 21),
            ("<|im_end|>", 621, 631),
        ]
    assert codec.cache.num_bytes == 0


def test_several_threads_may_encode_at_the_same_time(files: TokenizerFiles) -> None:
    codec, results = FileCodec(files), list[list[int]]()
    text = "".join(TURNS * 20)
    threads = [
        threading.Thread(target=lambda: results.append(codec.encode(text, add_special=False).token_ids))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [in_one_call(files, text)] * 8
    codec.cache.check()
