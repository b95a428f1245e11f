"""The detokenizer returns each character once, whole, and as early as possible."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("random:llama-tiny")
TRICKY = "naïve 日本語 😀 👨‍👩‍👧 \u0000 \ufffd end"


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


def test_a_character_comes_with_its_last_byte() -> None:
    pieces = deltas(list("é😀x".encode()))
    assert pieces == ["", "é", "", "", "", "😀", "x", ""]


def test_invalid_bytes_become_a_replacement_character() -> None:
    assert deltas([0xFF, 0x41]) == ["\ufffd", "A", ""]
    assert deltas([0xE2, 0x82, 0x41]) == ["", "", "\ufffdA", ""]
    assert deltas([0x41, 0xE2, 0x82]) == ["A", "", "", "\ufffd"]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, TOKENIZER.info.vocab_size - 1), max_size=8), max_size=12))
def test_the_text_does_not_depend_on_the_division_into_runs(runs: list[list[int]]) -> None:
    detokenizer, token_ids = TOKENIZER.detokenizer(), [token_id for run in runs for token_id in run]
    assert "".join([*map(detokenizer.push, runs), detokenizer.flush()]) == TOKENIZER.decode(token_ids)


def test_special_tokens_have_no_text() -> None:
    end = TOKENIZER.special_tokens["<|im_end|>"]
    assert deltas([0x41, end, 0x42]) == ["A", "", "B", ""]


def test_text_of_many_scripts_survives_the_round_trip() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(TRICKY)) == TRICKY
