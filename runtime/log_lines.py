"""The log of a process on stderr, which Ray writes into a file: a record in one line and indented lines below.

Messages quote names and errors that come from clients: no record obeys or forges anything in a terminal or a log file.
"""

from __future__ import annotations

import logging

from core.plain_text import escaped
from runtime.line_writer import LineWriter

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_CHARS = 20_000  # characters of a record of the log, which may have a traceback; beyond: the middle is cut


class LogLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > MAX_CHARS:
            text = f"{text[: MAX_CHARS // 2]}\n... {len(text) - MAX_CHARS} characters ...\n{text[-MAX_CHARS // 2 :]}"
        return escaped(text, "\n").replace("\n", "\n  ")


def log_to_stderr(level: int, stream: LineWriter | None = None) -> None:
    """`stream`: in place of stderr itself. Does nothing if the process logs already."""
    handler: logging.Handler = logging.StreamHandler(stream)
    handler.setFormatter(LogLines(FORMAT))
    logging.basicConfig(handlers=[handler], level=level)
