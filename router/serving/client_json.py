"""JSON in the requests of clients. Lengths are checked before texts are parsed."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from core.errors import InvalidRequest, quoted
from core.request import MAX_JSON_CHARS

MAX_JSON_DEPTH = 32


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def json_object(field: str, text: str) -> dict[str, Any]:
    """The object; an empty one for an empty text. Raises `InvalidRequest`."""
    value = json_value(field, text, "a JSON object") if text else {}
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"must be a JSON object, is {quoted(text)}")
    return value


def json_value(field: str, text: str, what: str = "JSON") -> Any:
    """Raises `InvalidRequest`."""
    if len(text) > MAX_JSON_CHARS:
        raise InvalidRequest(field, f"must have at most {MAX_JSON_CHARS} characters, has {len(text)}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest(field, f"must be nested at most {MAX_JSON_DEPTH} deep") from None
    except ValueError as error:
        raise InvalidRequest(field, f"must be {what}: {error}") from None
    check_value(field, value)
    return value


def check_value(field: str, value: object, levels: int = MAX_JSON_DEPTH) -> None:
    """Raise `InvalidRequest` for what UTF-8 JSON cannot hold again: deep nesting, 1e999, half a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "must not contain half a surrogate pair") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(field, "must have finite numbers")
    elif isinstance(value, dict | list):
        if levels == 0:
            raise InvalidRequest(field, f"must be nested at most {MAX_JSON_DEPTH} deep")
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            check_value(field, item, levels - 1)
