"""The text of a stream depends on the text of its tokens, not on its division into tokens.

The oracle reads the whole text at once. The text ends at the stop string that is complete first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream

LETTERS = st.text("abé😀", max_size=8)  # few letters, so that stop strings overlap the text and each other
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=4)


def stream_of(pieces: list[str], stops: list[str]) -> TextStream:
    """A stream in which the text of token i is the i-th piece."""
    return TextStream(IncrementalDetokenizer([piece.encode() for piece in pieces].__getitem__), StopStrings(stops))


def read_at_once(text: str, stops: list[str]) -> tuple[str, str]:
    """(text before the first complete stop string, the stop string). If two end together, the longer one counts."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(matching, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@settings(max_examples=400)
@given(st.lists(LETTERS, max_size=10), STOPS, st.sets(st.integers(0, 10)))
@example(["a", "b", "c"], ["ab"], set())
@example(["a", "b", "c"], ["ab", "abc"], set())
@example(["a", "b", "c", "d"], ["abcd", "bc"], set())
@example(["a", "a", "b"], ["ab", "b"], set())
def test_text_match_and_last_token_depend_on_the_text_and_not_on_its_tokens_or_their_runs(
    pieces: list[str], stops: list[str], cuts: set[int]
) -> None:
    """The client gets the same tokens and the same text, however many tokens the router joins."""

    def read(places: Iterable[int]) -> tuple[str, str, int]:
        """In runs that end at these places."""
        stream, text, num_tokens = stream_of(pieces, stops), "", 0
        for start, end in itertools.pairwise([0, *places]):
            shown, num_used = stream.push(range(start, end))
            text, num_tokens = text + shown, num_tokens + num_used
        return text + stream.flush(), stream.stop_match, num_tokens

    count = len(pieces)
    one_by_one = read(range(1, count + 1))
    assert one_by_one[:2] == read_at_once("".join(pieces), stops)
    assert read([count]) == one_by_one
    assert read(sorted({cut for cut in cuts if cut < count} | {count})) == one_by_one


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
