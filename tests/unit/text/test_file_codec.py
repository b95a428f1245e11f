"""The tokenizer of a model leaves the interpreter lock to other threads, and does not tokenize known turns again."""

from __future__ import annotations

import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from tests.support.tokenizers import SPECIAL, byte_level_tokenizer, in_directory, smollm_gguf
from text.file_codec import FileCodec
from text.piece_cache import PieceCache
from text.pieces import MAX_CUT_TOKENS, Cutter, cut_tokens
from text.tokenizer_files import TokenizerFiles

WORDS = "the cat sat on the mat and then another can ran " * 2000
TURNS = ["<|im_start|>system\n" + "be an an " * 100, "<|im_end|>\n<|im_start|>user\nhi" * 30, "<|im_end|>" + "n" * 600]


@pytest.fixture
def files(tmp_path: Path) -> TokenizerFiles:
    return smollm_gguf(tmp_path)


def in_one_call(tokenizer: Tokenizer, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
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
        assert codec.encode(text, add_special=False).token_ids == in_one_call(files.tokenizer, text)
    assert codec.cache.num_hits > 0
    before = codec.cache.num_misses
    codec.encode("".join(TURNS), add_special=False)
    assert codec.cache.num_misses == before


def test_requests_with_different_salts_share_no_piece(files: TokenizerFiles) -> None:
    codec, text = FileCodec(files), "".join(TURNS)
    for salt in ("", "a", "b"):
        assert codec.encode(text, False, salt).token_ids == in_one_call(files.tokenizer, text)
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
    assert results == [in_one_call(files.tokenizer, text)] * 8
    codec.cache.check()


# ---- Where a text may be cut so that its pieces have the tokens of the whole text.


def added(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, special=True, **({"normalized": False} | options))


def cuts_of(tokenizer: Tokenizer) -> list[str]:
    known = list(tokenizer.get_added_tokens_decoder().values())
    return cut_tokens(known, {token.content for token in known})


# A text of two pieces, the token that the second piece starts with, and what makes the cut wrong.
WRONG_CUTS = {
    "searched in normalized text": ("x", "<a>", [added("<a>", normalized=True)]),
    "takes spaces before it": ("x ", "<a>", [added("<a>", lstrip=True)]),
    "must be a word": ("x", "<a>", [added("<a>", single_word=True)]),
    "another token reaches into it": ("x", "<a>", [added("<a>"), added("x<")]),
    "reaches into itself": ("<", "<<", [added("<<")]),
    "a longer token takes spaces before it": (" ", "<a>b", [added("<a>"), added("<a>b", lstrip=True)]),
    "starts with a letter, beside a word": ("<b>", "x|", [added("x|"), added("<b>", single_word=True)]),
}


@pytest.mark.parametrize(("before", "after", "tokens"), WRONG_CUTS.values(), ids=WRONG_CUTS)
def test_a_text_is_not_cut_where_its_tokens_would_change(before: str, after: str, tokens: list[AddedToken]) -> None:
    tokenizer = byte_level_tokenizer(tokens)
    tokenizer.normalizer = normalizers.Prepend("_")  # before each text between two tokens of the raw text
    in_pieces = in_one_call(tokenizer, before) + in_one_call(tokenizer, after)
    assert in_pieces != in_one_call(tokenizer, before + after)
    assert tokens[0].content not in cuts_of(tokenizer)


def test_a_special_token_that_is_found_everywhere_is_a_cut() -> None:
    tokens = [added("<|im_start|>"), added("<|im_end|>", rstrip=True), added("\n\n"), added("[INST]")]
    assert cuts_of(byte_level_tokenizer(tokens)) == ["<|im_start|>", "<|im_end|>", "[INST]"]


def test_pieces_are_cut_before_special_tokens_and_have_the_least_length() -> None:
    pieces = Cutter(["<s>", "</s>"], min_piece_chars=6).cut("ab<s>cd</s><s>efg</s>")
    assert [(piece.start, piece.text) for piece in pieces] == [(0, "ab<s>cd"), (7, "</s><s>efg"), (17, "</s>")]
    assert [piece.special for piece in pieces] == [
        [("<s>", 2, 5)],
        [("</s>", 7, 11), ("<s>", 11, 14)],
        [("</s>", 17, 21)],
    ]


def test_the_number_of_searched_tokens_is_bounded() -> None:
    cutter = Cutter([f"<{number}>" for number in range(MAX_CUT_TOKENS + 1)], 1)
    text = f"a<{MAX_CUT_TOKENS - 1}>b<{MAX_CUT_TOKENS}>c"
    assert [piece.text for piece in cutter.cut(text)] == ["a", f"<{MAX_CUT_TOKENS - 1}>b<{MAX_CUT_TOKENS}>c"]


# ---- The cache of tokenized pieces is bounded in bytes, and forgets the least recently used piece first.


def ids_of(count: int) -> array[int]:
    return array("I", range(count))


def test_the_least_recently_used_piece_leaves_when_the_bytes_are_used_up() -> None:
    sizing = PieceCache()
    sizing.put(("", "1"), ids_of(100))
    cache = PieceCache(max_bytes=2 * sizing.num_bytes)
    cache.put(("", "1"), ids_of(100))
    cache.put(("", "2"), ids_of(100))
    assert cache.get(("", "1")) is not None
    cache.put(("", "3"), ids_of(100))
    assert [cache.get(("", text)) is not None for text in "123"] == [True, False, True]
    assert (cache.num_hits, cache.num_misses) == (3, 1)
    cache.check()


def test_a_piece_larger_than_the_cache_is_not_kept() -> None:
    cache = PieceCache(max_bytes=1000)
    cache.put(("", "a" * 2000), ids_of(1))
    assert cache.get(("", "a" * 2000)) is None
    assert cache.num_bytes == 0
    cache.check()


def test_a_piece_that_is_put_twice_counts_once() -> None:
    cache = PieceCache()
    cache.put(("", "text"), ids_of(3))
    before = cache.num_bytes
    cache.put(("", "text"), ids_of(3))
    assert cache.num_bytes == before
    cache.check()


def test_the_counted_bytes_cover_the_objects_of_an_entry() -> None:
    cache, text = PieceCache(), "é" * 600
    cache.put(("salt", text), ids_of(400))
    assert cache.num_bytes >= sys.getsizeof(("salt", text)) + sys.getsizeof(text) + 400 * 4
