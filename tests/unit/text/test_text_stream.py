"""The text of a choice ends before its stop string, and no part of a stop string is returned."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from text.detokenizer import MAX_TEXT_CHARS, TOKENS_PER_STEP, IncrementalDetokenizer, decode_tokens
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import load_tokenizer


def test_a_stop_string_that_the_last_flush_completes_is_cut_too() -> None:
    pieces = [b"a", "日".encode()[:2]]
    stream = TextStream(IncrementalDetokenizer(pieces.__getitem__), StopStrings(["\ufffd"]))
    assert [stream.push((token_id,))[0] for token_id in range(2)] == ["a", ""]
    assert (stream.flush(), stream.stop_match) == ("", "\ufffd")


@pytest.mark.parametrize("runs", [[1] * 5, [5], [2, 3], [3, 2]])
def test_the_text_of_the_first_min_tokens_is_not_searched(runs: list[int]) -> None:
    pieces = [b"END", b" E", b"ND", b" E", b"ND"]
    stream = TextStream(IncrementalDetokenizer(pieces.__getitem__), StopStrings(["END"]), 3)
    text, start, num_used = "", 0, 0
    for length in runs:
        released, used = stream.push(range(start, start + length))
        text, num_used, start = text + released, num_used + used, start + length
    assert (text, stream.stop_match, num_used) == ("END END ", "END", 5)


def test_the_work_for_a_character_does_not_grow_with_the_stop_strings() -> None:
    """Counted in lines of Python. The text ends with the start of the first stop string all the time."""

    def lines_for(stop_strings: list[str]) -> int:
        stream, num_lines = TextStream(IncrementalDetokenizer([b"a", b"c"].__getitem__), StopStrings(stop_strings)), 0

        def trace(_: FrameType, event: str, __: Any) -> Any:
            nonlocal num_lines
            num_lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for number in range(1000):
                stream.push((number % 300 == 299,))  # the other character leads back to the start
        finally:
            sys.settrace(before)
        assert not stream.stop_match
        return num_lines

    longest = "a" * 255
    hostile = [longest + "z", *("a" + char * 254 + "z" for char in "bcdefghijklmnop")]
    assert lines_for(hostile) < 1.5 * lines_for(["az"])


# ---- The detokenizer returns each character once, whole, and as early as possible.

TOKENIZER = load_tokenizer("random:llama-tiny")


def deltas(token_ids: list[int]) -> list[str]:
    detokenizer = TOKENIZER.detokenizer()
    return [*(detokenizer.push((token_id,)) for token_id in token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_delta_of_valid_text_contains_a_part_of_a_character(text: str) -> None:
    token_ids = list(text.encode("utf-8", errors="replace"))
    whole = bytes(token_ids).decode()
    pieces = deltas(token_ids)
    assert "".join(pieces) == whole
    assert sum("\ufffd" in piece for piece in pieces) == whole.count("\ufffd")


@pytest.mark.parametrize(
    ("token_ids", "texts"),
    [
        ([*"é😀x".encode()], ["", "é", "", "", "", "😀", "x", ""]),
        ([0xFF, 0x41], ["\ufffd", "A", ""]),
        ([0xE2, 0x82, 0x41], ["", "", "\ufffdA", ""]),
        ([0x41, 0xE2, 0x82], ["A", "", "", "\ufffd"]),
        ([0x41, TOKENIZER.special_tokens["<|im_end|>"], 0x42], ["A", "", "B", ""]),
    ],
    ids=["characters", "an invalid byte", "a character that breaks off", "one at the end", "a special token"],
)
def test_a_character_comes_with_its_last_byte_and_invalid_bytes_as_one(token_ids: list[int], texts: list[str]) -> None:
    assert deltas(token_ids) == texts


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, TOKENIZER.info.vocab_size - 1), max_size=8), max_size=12))
def test_the_text_does_not_depend_on_the_division_into_runs(runs: list[list[int]]) -> None:
    detokenizer, token_ids = TOKENIZER.detokenizer(), [token_id for run in runs for token_id in run]
    assert "".join([*map(detokenizer.push, runs), detokenizer.flush()]) == TOKENIZER.decode(token_ids)


def test_the_text_of_many_tokens_has_whole_characters_and_a_bound() -> None:
    text = "a\u00e9\U0001f600" * TOKENS_PER_STEP  # a step ends within a character
    assert decode_tokens(text.encode(), lambda byte: bytes((byte,))) == text
    longest = b" " * 1024
    assert len(decode_tokens([0] * (MAX_TEXT_CHARS // 1024), lambda _: longest)) == MAX_TEXT_CHARS
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TEXT_CHARS} characters"):
        decode_tokens([0] * (MAX_TEXT_CHARS // 1024 + 1), lambda _: longest)
