"""Converts the tokens of one choice to its text, in whole characters, up to the first stop string.

Text that may begin a stop string is held back until later text decides. Text and match do not depend on the division
of the tokens into runs. The text of the first `min_tokens` tokens is not searched for stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings


class TextStream:
    """After `stop_match` is set, the text is complete and further tokens add nothing."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: StopStrings, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._state, self._held = 0, ""  # of the stop strings: the text that waits
        self._num_unsearched = min_tokens  # of the tokens to come
        self.has_stop_strings = bool(stop_strings)
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
        before = self._detokenizer.save(), self._state, self._held
        text = self._release(self._detokenizer.push(token_ids))
        if not self.stop_match:
            return text, len(token_ids)
        detokenizer_state, self._state, self._held = before
        self._detokenizer.restore(detokenizer_state)
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
        if not self._held and self._stop_strings.first_chars.isdisjoint(delta):
            return delta  # no stop string begins here
        # The first complete match ends the text, so the division of the text into tokens does not matter. Of two
        # matches with the same end, the longer one counts.
        self._state, num_read, num_matched = self._stop_strings.search(self._state, delta)
        text = self._held + delta[:num_read]
        num_held = num_matched or self._stop_strings.depths[self._state]
        shown, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if num_matched:
            self.stop_match, self._held = self._held, ""
        return shown
