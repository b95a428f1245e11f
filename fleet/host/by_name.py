"""Values between processes of two versions of Tandem: in a roll, an earlier supervisor starts services of a later one.

The pickle of a frozen dataclass with slots has its values by position, so an option that one version adds would shift
every later one. `pack` writes the values of every dataclass and named tuple by name. `unpack` leaves out what this
version does not know, and what the other version does not know keeps its default. Enums and functions travel by their
own names. A value of another type than this version declares is refused, before any code meets it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import logging
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache, wraps
from types import UnionType
from typing import Any, ParamSpec, get_args, get_origin, get_type_hints

from core.errors import ConfigError, TandemError

HEADER = b"tandem:"  # then the version of the sender, a line feed, and the pickle

P = ParamSpec("P")
logger = logging.getLogger(__name__)


class ByName:
    """Wraps what a call of an actor takes or answers. The other process gets the value itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return unpack, (pack(self.value),)


def answer_by_name(method: Callable[P, Awaitable[Any]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """For a method that a process of another version may call."""

    @wraps(method)
    async def answer(*arguments: P.args, **named: P.kwargs) -> Any:
        return ByName(await method(*arguments, **named))

    return answer


def software_version() -> str:
    """The installed version of Tandem; empty if it runs from a directory that is not installed."""
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return ""


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    buffer.write(HEADER + software_version().encode() + b"\n")
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Raises `ConfigError`, which names both versions, for what this version cannot read."""
    head, _, pickled = packed.partition(b"\n")
    ours = software_version() or "of a directory"
    if not head.startswith(HEADER):
        raise ConfigError(
            f"the supervisor is of a version of Tandem before {ours}, which sends options by position; "
            "start `tandem serve` again, so that it has this version"
        )
    try:
        return pickle.loads(pickled)
    except TandemError:
        raise
    except Exception as error:  # a pickle of another version can fail in any way
        theirs = head.removeprefix(HEADER).decode() or "of a directory"
        raise ConfigError(f"Tandem {ours} cannot read what Tandem {theirs} has sent: {error}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        names = () if isinstance(value, type) else _names(type(value))
        return (_build, (type(value), {name: getattr(value, name) for name in names})) if names else NotImplemented


def _build(kind: Any, values: dict[str, Any]) -> Any:
    known = _names(kind)
    if unknown := values.keys() - known:
        logger.warning("%s of another version of Tandem: left out %s", kind.__name__, ", ".join(sorted(unknown)))
    taken, hints = {name: value for name, value in values.items() if name in known}, _hints(kind)
    for name, value in taken.items():
        if type(value) is not hints[name] and not _is_of(value, hints[name]):
            raise TypeError(f"{kind.__name__}.{name} is {value!r:.100}, not of {hints[name]}")
    return kind(**taken)


def _names(kind: Any) -> tuple[str, ...]:
    """Of the fields of a dataclass or a named tuple; empty for other kinds."""
    if dataclasses.is_dataclass(kind):
        return tuple(one.name for one in dataclasses.fields(kind) if one.init)
    return getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()


_hints = cache(get_type_hints)


def _is_of(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is UnionType:
        return any(_is_of(value, one) for one in inner)
    if kind is float:
        return isinstance(value, int | float)
    if not isinstance(value, kind):
        return False
    if isinstance(value, Mapping):
        return all(_is_of(key, inner[0]) and _is_of(one, inner[1]) for key, one in value.items())
    return not inner or all(_is_of(one, inner[0]) for one in value)
