"""Files that a command writes at its end."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError


def check_output(option: str, path: Path) -> None:
    """Raises `ConfigError` before long work whose result cannot be written."""
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{option}: the directory of {path} does not exist")
