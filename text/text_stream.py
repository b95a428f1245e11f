"""From one choice's tokens to its text: whole characters only, and nothing of a stop string.

Text that may be the beginning of a stop string is held back until it is known to be one or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from text.detokenizer import IncrementalDetokenizer


class TextStream:
    """After `stop_match` is set the text is complete, and further tokens add nothing."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stop_match = ""

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` has come."""
        return self._show(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """What is left when the last token has come."""
        shown = self._show(self._detokenizer.flush())
        held, self._held = self._held, ""
        return shown + ("" if self.stop_match else held)

    def _show(self, delta: str) -> str:
        if self.stop_match:
            return ""
        text = self._held + delta
        # The match that is complete first ends the text, so that how tokens divide the text changes nothing; of two
        # that end together, the longer one does.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            _, position, self.stop_match = min(found)
            self._held = ""
            return text[:position]
        num_held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
