"""Where a text may be cut so that its pieces have the tokens of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.support.tokenizers import byte_level_tokenizer
from text.pieces import MAX_CUT_TOKENS, Cutter, cut_tokens


def added(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, special=True, **({"normalized": False} | options))


def cuts_of(tokenizer: Tokenizer) -> list[str]:
    known = list(tokenizer.get_added_tokens_decoder().values())
    return cut_tokens(known, {token.content for token in known})


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


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
    assert ids(tokenizer, before) + ids(tokenizer, after) != ids(tokenizer, before + after)
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
