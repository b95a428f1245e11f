"""A text cut into pieces, some of them cached, has the tokens that the tokenizer's library gives for the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.support.tokenizers import MAKERS, SPECIAL, byte_level_tokenizer
from text.file_codec import FileCodec
from text.pieces import Cutter, cut_tokens
from text.tokenizer_files import TokenizerFiles

FRAGMENTS = [
    *SPECIAL, "<|im_", "|>", "<", "s>", "\uff1cs\uff1e", " ", "  ", "\n", "\n\n", "\u2581", "an", "a", "n", "x y", "12",
    "'s", "é", "e\u0301", "\u0301", "日本", "😀", "\ufdd0",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    make: Callable[[Path], TokenizerFiles] = request.param
    return make(tmp_path_factory.mktemp("model"))


def expected(files: TokenizerFiles, text: str) -> tuple[list[int], list[tuple[str, int, int]]]:
    """(token ids, special tokens and their places), from one call for the whole text."""
    encoding = files.tokenizer.encode(text, add_special_tokens=False)
    break_id = files.tokenizer.token_to_id("\ufdd0")
    special = []
    for index, token_id in enumerate(encoding.ids):
        if token_id in files.special_ids:
            start, end = encoding.token_to_chars(index) or (0, 0)
            special.append((files.added_tokens[token_id], start, end))
    return [token_id for token_id in encoding.ids if token_id != break_id], special


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TEXTS, min_size=1, max_size=5), min_piece_chars=st.integers(1, 12))
def test_a_conversation_that_grows_has_the_tokens_of_its_whole_text(
    files: TokenizerFiles, turns: list[str], min_piece_chars: int
) -> None:
    codec = FileCodec(files, min_piece_chars)
    for end in range(1, len(turns) + 1):
        text = "".join(turns[:end])
        encoded = codec.encode(text, add_special=False)
        token_ids, special = expected(files, text)
        assert encoded.token_ids == token_ids
        # The library counts the spaces that `rstrip` takes as part of the special token.
        assert [found[:2] for found in encoded.special] == [found[:2] for found in special]
        codec.cache.check()


# Few characters, so that added tokens overlap and contain each other.
OPTIONS = st.sampled_from([{}, {}, {"normalized": True}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
ADDED = st.builds(
    lambda text, special, options: AddedToken(text, special=special, **({"normalized": False} | options)),
    st.text("<a >", min_size=1, max_size=3),
    st.booleans(),
    OPTIONS,
)


@st.composite
def tokens_and_text(draw: st.DrawFn) -> tuple[list[AddedToken], str]:
    added = draw(st.lists(ADDED, min_size=1, max_size=3, unique_by=lambda token: token.content))
    fragments = [*(token.content for token in added), "<", "a", " ", ">", "A"]
    return added, "".join(draw(st.lists(st.sampled_from(fragments), max_size=8)))


@settings(max_examples=400)
@given(tokens_and_text())
def test_no_cut_changes_a_token_however_added_tokens_overlap(drawn: tuple[list[AddedToken], str]) -> None:
    added, text = drawn
    tokenizer: Tokenizer = byte_level_tokenizer(added)
    tokenizer.normalizer = normalizers.Lowercase()
    known = list(tokenizer.get_added_tokens_decoder().values())
    pieces = Cutter(cut_tokens(known, {token.content for token in known if token.special}), 1).cut(text)
    together = [token_id for piece in pieces for token_id in tokenizer.encode(piece.text, add_special_tokens=False).ids]
    assert "".join(piece.text for piece in pieces) == text
    assert together == tokenizer.encode(text, add_special_tokens=False).ids
    for piece in pieces:
        for special, start, end in piece.special:
            assert text[start:end] == special
            assert piece.start <= start < end <= piece.start + len(piece.text)
