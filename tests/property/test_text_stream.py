"""The text of a stream depends on the text of its tokens, not on its division into tokens.

The oracle reads the whole text at once. The text ends at the stop string that is complete first.
"""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream

LETTERS = st.text("abé😀", max_size=8)  # few letters, so that stop strings overlap the text and each other
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=4)


def stream_of(pieces: list[str], stops: list[str]) -> TextStream:
    """A stream in which the text of token i is the i-th piece."""
    return TextStream(IncrementalDetokenizer([piece.encode() for piece in pieces].__getitem__), StopStrings(stops))


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    """(the text that is shown, the stop string that matched)"""
    stream = stream_of(pieces, stops)
    shown = [stream.push((token_id,))[0] for token_id in range(len(pieces))]
    return "".join([*shown, stream.flush()]), stream.stop_match


def read_at_once(text: str, stops: list[str]) -> tuple[str, str]:
    """(text before the first complete stop string, the stop string). If two end together, the longer one counts."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(matching, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def splits(text: str) -> list[list[str]]:
    """Every way to divide `text` into pieces."""
    found = []
    for cuts in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        places = [0, *(place for place, cut in enumerate(cuts, start=1) if cut), len(text)]
        found.append([text[start:end] for start, end in itertools.pairwise(places)])
    return found


@given(LETTERS, STOPS)
@example("abc", ["ab", "abc"])
@example("abcd", ["abcd", "bc"])
@example("aab", ["ab", "b"])
def test_every_split_of_a_text_shows_the_same_text(text: str, stops: list[str]) -> None:
    wanted = read_at_once(text, stops)
    for pieces in splits(text):
        assert streamed(pieces, stops) == wanted, pieces


@given(st.lists(LETTERS, max_size=10), STOPS, st.data())
@example(["a", "b", "c"], ["ab"], None)
def test_text_match_and_last_token_do_not_depend_on_the_division_into_runs(
    pieces: list[str], stops: list[str], data: st.DataObject | None
) -> None:
    """The client gets the same tokens and the same text, however many tokens the router joins."""

    def read(run_lengths: list[int]) -> tuple[str, str, int]:
        stream, text, num_tokens, start = stream_of(pieces, stops), "", 0, 0
        for length in run_lengths:
            shown, num_used = stream.push(range(start, start + length))
            text, num_tokens, start = text + shown, num_tokens + num_used, start + length
        return text + stream.flush(), stream.stop_match, num_tokens

    one_by_one = read([1] * len(pieces))
    assert read([len(pieces)]) == one_by_one
    if data is not None:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
        assert read([end - start for start, end in itertools.pairwise(cuts)]) == one_by_one


@given(st.text("ab", max_size=60), st.lists(st.text("ab", min_size=1, max_size=12), max_size=6))
def test_only_the_longest_text_that_may_start_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream, shown = stream_of(list(text), stops), ""
    for position in range(len(text)):
        shown += stream.push((position,))[0]
        if stream.stop_match:
            break
        read = text[: position + 1]
        ends = (read[place:] for place in range(len(read)))  # the longest first
        assert read.removeprefix(shown) == next((end for end in ends if any(s.startswith(end) for s in stops)), "")
    assert (shown + stream.flush(), stream.stop_match) == read_at_once(text, stops)
