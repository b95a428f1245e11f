"""The output of a service into a terminal, a pipe or a file that may take nothing for a while."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from typing import TextIO

MAX_LINES = 1_000  # lines that wait for a terminal or a pipe that nobody reads; beyond: later ones are lost
LAST_LINES_S = 1.0  # the last lines, at the end of the process; beyond: they are lost


class LineWriter:
    """A thread writes: a terminal stopped by Ctrl-S, or a pager that is not scrolled, holds up no caller of `write`.

    A closed pipe or terminal, or a full disk, loses the line: the service goes on. The log takes this for a stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # without a lock that a signal handler could wait for
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        _writers.append(self)

    def write(self, line: str) -> None:
        """A whole line, or all that follows it. Does not wait."""
        if line and self._lines.qsize() < MAX_LINES:
            self._lines.put(line)

    def flush(self) -> None:
        """For a console. Does not wait."""

    def _run(self) -> None:
        while line := self._lines.get():
            with contextlib.suppress(OSError):
                os.write(self._descriptor, line.encode(self._encoding, "backslashreplace"))

    def end(self) -> None:
        self._lines.put("")
        self._thread.join(LAST_LINES_S)


_writers: list[LineWriter] = []


@atexit.register
def write_last_lines() -> None:
    """Before the end of the process, which calls this itself unless it ends by `os._exit`."""
    for writer in _writers:
        writer.end()
