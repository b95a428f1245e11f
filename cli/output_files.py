"""The files that a command writes at its end."""

from __future__ import annotations

import os
from pathlib import Path

from core.errors import ConfigError, shortened


def check_output(option: str, path: Path | None) -> None:
    """Raises `ConfigError` before long work whose result cannot be written. None is no file."""
    if path is None:
        return
    try:
        folder = path.resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"{option}: the directory of {path} does not exist")
        if path.is_dir():
            raise ConfigError(f"{option}: {path} is a directory")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{option}: {path} must not be written")
    except (OSError, RuntimeError) as error:  # a folder that cannot be read, a name too long; a loop of links
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: cannot write {shortened(str(path))}: {why}") from error
