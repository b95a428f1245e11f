"""A record of the log is one line of its own, whatever a client put into it."""

from __future__ import annotations

import logging

from core.plain_text import is_plain
from runtime.log_lines import FORMAT, MAX_CHARS, LogLines


def line_of(message: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return LogLines(FORMAT).format(logging.LogRecord("gateway", logging.ERROR, "", 0, "failed: %s", (message,), info))


def test_a_text_of_a_client_is_neither_obeyed_nor_a_record() -> None:
    forged = "a\n2026-01-01 00:00:00,000 INFO router: all is well\x1b[2J"
    for found in (line_of(forged), line_of("", ValueError(forged))):
        first, *others = found.split("\n")
        assert "ERROR gateway: failed" in first
        assert others
        assert all(line.startswith("  ") for line in others)
        assert all(is_plain(line) for line in (first, *others))
        assert "\\x1b[2J" in found


def test_a_long_record_keeps_its_start_and_its_end() -> None:
    found = line_of("a" * MAX_CHARS + "b" * MAX_CHARS)
    assert len(found) < MAX_CHARS + 100
    assert "failed: aaa" in found
    assert found.endswith("bbb")
