"""Refuses fields of a later version. A request that sets one asks for what this version cannot do."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from core.errors import InvalidRequest


def refuse_unknown(message: Message, name: str = "request") -> None:
    """Raises `InvalidRequest` for a field of `message`, at any depth, that this version does not know. Unset values, as
    a later version may send them, are ignored. `name`: of the message, for the error."""
    refuse_unknown_inside(message, name)
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if not field.is_repeated:
            refuse_unknown(value, field.name)
        elif not field.message_type.GetOptions().map_entry:
            for item in value:
                refuse_unknown(item, field.name)


def refuse_unknown_inside(message: Message, name: str) -> None:
    """As `refuse_unknown`, without the messages inside."""
    found: Any = UnknownFieldSet(message)  # the stubs know no iteration
    for unknown in found:
        if unknown.data not in (0, b""):
            raise InvalidRequest(
                name, f"field {unknown.field_number} of {message.DESCRIPTOR.name} is of a later version of Tandem"
            )
