"""The output of a service whose reader stops."""

from __future__ import annotations

import os

from runtime.line_writer import MAX_LINES, LineWriter

LINE = "x" * 99 + "\n"


def test_a_reader_that_takes_nothing_holds_up_no_writer_and_gets_whole_lines_later() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads) as reader, os.fdopen(writes, "w") as stream:
        writer = LineWriter(stream)
        writer.write("")  # a console does, and writes on
        for _ in range(3 * MAX_LINES):  # the last ones are lost, and none waits
            writer.write(LINE)
        assert [reader.readline() for _ in range(MAX_LINES)] == [LINE] * MAX_LINES
