"""The trace file: one JSON line for each span."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from core.errors import ConfigError

_log = logging.getLogger(__name__)


class JsonLinesExporter(SpanExporter):
    """Appends each span to a file as one JSON line. Several processes may share the file.

    Without room on the disk, spans are dropped, and a warning says so once until spans are written again.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written, because a failed export raises no error."""
        self._path = path
        self._lock = threading.Lock()
        self._separator = b""  # a newline after a torn line
        self._failing = False
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"[telemetry] trace_file: cannot write {path}: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(json.loads(span.to_json(indent=None))) + "\n" for span in spans)
        with self._lock:
            try:
                self._append(lines.encode())
            except OSError as error:
                if not self._failing:
                    _log.warning("cannot write traces to %s: %s. Spans are dropped.", self._path, error.strerror)
                self._failing = True
                return SpanExportResult.FAILURE
            self._failing = False
        return SpanExportResult.SUCCESS

    def _append(self, lines: bytes) -> None:
        """Raises `OSError` if the disk has no room for all lines."""
        # O_APPEND writes each line whole at the end, also while other processes write.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = self._separator + lines
            num_written = os.write(handle, content)
        finally:
            os.close(handle)
        if num_written < len(content):
            self._separator = b"\n"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._separator = b""
