"""Text of clients and of other processes, for a reader that obeys or joins characters: a terminal, a log, a table."""

from __future__ import annotations

import re

# Control characters, the ends of lines and paragraphs, changes of the writing direction, and half surrogate pairs.
# Joiners and marks (U+200B to U+200F) stay: languages and emoji need them.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_plain(text: str) -> bool:
    """No character of `text` does more than show itself."""
    return _CONTROLS.search(text) is None


def escaped(text: str, keeps: str = "") -> str:
    r"""`text` with each control character as Python writes it, e.g. `\x1b`, but for those in `keeps`."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keeps else repr(found[0])[1:-1], text)
