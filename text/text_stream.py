"""Converts the tokens of one choice to its text, in whole characters, up to the first stop string.

Text that may begin a stop string is held back until later text decides. Text and match do not depend on the division
of the tokens into runs. The text of the first `min_tokens` tokens is not searched for stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from text.detokenizer import IncrementalDetokenizer


class TextStream:
    """After `stop_match` is set, the text is complete and further tokens add nothing."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._first_chars = frozenset(stop[0] for stop in self._stop_strings)
        self._held = ""
        self._num_unsearched = min_tokens  # of the tokens to come
        self.has_stop_strings = bool(self._stop_strings)
        self.stop_match = ""

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that the client may see after these tokens, beyond the text returned before, and the number of the
        tokens that belong to the output: the token that completes a stop string is the last one."""
        if not self.has_stop_strings:
            return self._detokenizer.push(token_ids), len(token_ids)
        if self.stop_match:
            return "", 0
        if self._num_unsearched:
            return self._push_unsearched(token_ids)
        if len(token_ids) == 1:
            return self._release(self._detokenizer.push(token_ids)), 1
        state, held = self._detokenizer.save(), self._held
        text = self._release(self._detokenizer.push(token_ids))
        if not self.stop_match:
            return text, len(token_ids)
        self._held = held
        self._detokenizer.restore(state)
        return self._push_one_by_one(token_ids)

    def _push_unsearched(self, token_ids: Sequence[int]) -> tuple[str, int]:
        first = token_ids[: self._num_unsearched]
        self._num_unsearched -= len(first)
        text, later = self._detokenizer.push(first), token_ids[len(first) :]
        if not later:
            return text, len(first)
        searched, num_used = self.push(later)
        return text + searched, len(first) + num_used

    def _push_one_by_one(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Find the token that completes a stop string. `token_ids` contain it."""
        self.stop_match, text, num_used = "", "", 0
        while not self.stop_match:
            text += self._release(self._detokenizer.push(token_ids[num_used : num_used + 1]))
            num_used += 1
        return text, num_used

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        released = self._release(self._detokenizer.flush())
        held, self._held = self._held, ""
        return released + ("" if self.stop_match else held)

    def _release(self, delta: str) -> str:
        if self.stop_match:
            return ""
        if not self._held and self._first_chars.isdisjoint(delta):
            return delta  # no stop string begins here
        text = self._held + delta
        # The first complete match ends the text, so the division of the text into tokens does not matter. Of two
        # matches with the same end, the longer one counts.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            _, position, self.stop_match = min(found)
            self._held = ""
            return text[:position]
        num_held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`, and shorter than `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
