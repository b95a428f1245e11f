"""The names of the values of protobuf enums, as people and programs read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol


class WireEnum(Protocol):
    """A generated enum, such as `worker_pb2.WorkerState`."""

    DESCRIPTOR: Any

    def values(self) -> Sequence[int]: ...

    def Name(self, number: Any) -> str: ...


def short_name(kind: WireEnum, value: int) -> str:
    """WORKER_STATE_SERVING is "serving". A value that only a later version knows is "unknown 9"."""
    if value not in kind.values():
        return f"unknown {value}"
    prefix = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.DESCRIPTOR.name).upper()
    return kind.Name(value).removeprefix(f"{prefix}_").lower()
