"""Whether a weight file has changed while a memory map of it is read.

A byte behind the new end of a truncated file ends the process by SIGBUS, and other bytes in place give wrong weights.
A file that takes the place of another by a rename changes nothing: the map has the old one.
"""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError


class WatchedFile:
    def __init__(self, path: Path) -> None:
        """Before the file is mapped."""
        self._path, self._before = path, _state(path)

    def check(self) -> None:
        """Raises `ConfigError` if the file has changed in place."""
        now = _state(self._path)
        if now != self._before and now[:2] == self._before[:2]:
            raise ConfigError(f"{self._path} has changed while it was read; rename a complete file into its place")


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError):  # the map keeps the bytes of a removed file
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
