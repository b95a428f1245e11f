"""The mark of live options: a running service takes a new value of them (docs/adr/0052-live-options.md)."""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")

_MARK = {"live": True}


def live(default: T) -> T:
    """The default of a live option."""
    return field(default=default, metadata=_MARK)


def live_options(part: Any) -> list[str]:
    """Names of the live options of a dataclass of options."""
    return [option.name for option in fields(part) if option.metadata.get("live")]


def with_live(present: T, new: T) -> T:
    """`present` with the live options of `new`."""
    options: Any = {name: getattr(new, name) for name in live_options(new)}
    return replace(present, **options)  # type: ignore[type-var]
