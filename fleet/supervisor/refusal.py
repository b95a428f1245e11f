"""The answer to an order that the fleet does not take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from core.errors import InvalidRequest

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An `InvalidRequest` as a value: Ray would wrap the exception on its way between processes."""

    field: str
    message: str


def refusing(order: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T | Refusal]]:
    """Let an order answer with a `Refusal` where it raises `InvalidRequest`."""

    @wraps(order)
    async def answer(*arguments: P.args, **named: P.kwargs) -> T | Refusal:
        try:
            return await order(*arguments, **named)
        except InvalidRequest as refused:
            return Refusal(refused.field, refused.message)

    return answer
