"""The rows of a file of requests, read within bounds. Each error names file, line, field and limit."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, TypeVar

_T = TypeVar("_T", int, float)

# Limit: bytes of a line of a log or trace of requests, messages included; beyond: `ValueError` that names the line
MAX_ROW_BYTES = 4 * 1024 * 1024
MAX_ROWS = 1_000_000  # lines of a log or trace of requests; beyond: `ValueError` that names the option for fewer
# Limit: blocks in all prompts of a log or trace; beyond: `ValueError` that names the line and the option for fewer
MAX_BLOCKS = 4_000_000
# Limit: tokens of a prompt or an output in a log or trace; beyond: `ValueError` that names line and field
MAX_TOKENS = 4_000_000
MAX_TIME_S = 1e11  # of an arrival
KINDS: Mapping[object, str] = {int: "a whole number", float: "a number"}  # of values, by their parser

Row = Mapping[str, object]


def json_rows(path: Path, limit: int | None) -> Iterator[tuple[str, Row]]:
    """(place, object) of the first `limit` lines. Raises `ValueError` and `OSError`."""
    for number, line in lines(path, limit):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON at column {error.pos + 1}: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, is {line.strip()!r:.40}")
        yield where, row


def csv_rows(path: Path, limit: int | None) -> Iterator[tuple[str, Row]]:
    """As `json_rows`, of a file whose first line names the fields."""
    rows = csv.DictReader(line for _, line in lines(path, None if limit is None else limit + 1))
    try:
        for row in rows:
            yield f"{path}, line {rows.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from error


def open_regular(path: Path) -> BinaryIO:
    """Raises `ValueError` for a pipe or a device, which may never end or can be read only once, and `OSError`."""
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not path.is_dir():
        raise ValueError(f"{path}: must be a regular file, not a pipe or a device")
    return path.open("rb")


def lines(path: Path, limit: int | None) -> Iterator[tuple[int, str]]:
    """(number, text) of the first `limit` lines, of a gzip file those inside. Raises `ValueError` and `OSError`."""
    with open_regular(path) as stored:
        file = gzip.GzipFile(fileobj=stored) if path.suffix == ".gz" else stored
        number = 0
        while limit is None or number < limit:
            try:
                line = file.readline(MAX_ROW_BYTES + 1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}, line {number + 1}: {error}") from error
            if not line:
                return
            number += 1
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(f"{path}, line {number}: longer than {MAX_ROW_BYTES:,} bytes")
            if number > MAX_ROWS:
                raise ValueError(f"{path} has more than {MAX_ROWS:,} lines: read fewer by --requests")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")  # Excel writes a mark first
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8") from error


def number(where: str, row: Row, field: str, parse: Callable[[str], _T]) -> _T:
    """Raises `ValueError` for a missing, malformed or infinite value."""
    if row.get(field) is None:
        raise ValueError(f"{where}: {field} is missing")
    try:
        value = parse(str(row[field]))
    except ValueError as error:
        kind = KINDS.get(parse, "a time, in seconds or as ISO 8601 has it")
        raise ValueError(f"{where}: {field} must be {kind}, is {row[field]!r:.40}") from error
    if not math.isfinite(value):
        raise ValueError(f"{where}: {field} must be finite, is {row[field]!r:.40}")
    return value


def tokens(where: str, row: Row, field: str) -> int:
    """A length. Raises `ValueError` unless it is in [0, MAX_TOKENS]."""
    value = number(where, row, field, int)
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{where}: {field} must be in [0, {MAX_TOKENS:,}], is {value}")
    return value


class BlockCount:
    """The blocks of all prompts so far, which bound the memory of a workload."""

    def __init__(self) -> None:
        self._num_blocks = 0

    def add(self, where: str, num_blocks: int) -> None:
        """Raises `ValueError` beyond MAX_BLOCKS. Call it before the ids of the prompt are made."""
        self._num_blocks += num_blocks
        if self._num_blocks > MAX_BLOCKS:
            raise ValueError(f"{where}: more than {MAX_BLOCKS:,} blocks of prompts in all: read fewer by --requests")
