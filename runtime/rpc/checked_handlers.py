"""Handlers that refuse a call above the limits, and end one whose message cannot be decoded with a typed error.

For such a message gRPC itself answers UNKNOWN and logs a traceback: no client may fill a log.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from core.errors import InvalidRequest, TandemError
from runtime.rpc.call_limits import REFUSING, CallLimits

Abort = Callable[[Any, TandemError], Awaitable[NoReturn]]


class CheckedHandlers:
    """Takes the place of a server where generated code registers a servicer."""

    def __init__(self, server: grpc.aio.Server, abort: Abort) -> None:
        self._server, self._abort, self._limits = server, abort, CallLimits()

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._server.add_generic_rpc_handlers([_CheckedHandler(each, self._abort, self._limits) for each in handlers])

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """They are those of the generic handler of this service."""


class _CheckedHandler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # a generic class in the stubs alone
    def __init__(self, handler: Any, abort: Abort, limits: CallLimits) -> None:
        self._handler, self._abort, self._limits = handler, abort, limits
        self._checked: dict[str, Any] = {}  # by method

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if method not in self._checked:
            if (found := self._handler.service(handler_call_details)) is None:
                return None
            self._checked[method] = checked(found, self._abort)
        return self._checked[method] if self._limits.admit(method) else REFUSING


def checked(handler: Any, abort: Abort) -> Any:
    """A handler of the same kind, which decodes by itself."""
    decode = handler.request_deserializer
    if decode is None:
        return handler

    async def read(message: bytes, context: Any) -> Any:
        try:
            return decode(message)
        except DecodeError as error:
            await abort(context, InvalidRequest("request", str(error)))

    async def read_all(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for message in messages:
            yield await read(message, context)

    behave = getattr(handler, _kind_of(handler))

    async def argument(raw: Any, context: Any) -> Any:
        return read_all(raw, context) if handler.request_streaming else await read(raw, context)

    async def answer(raw: Any, context: Any) -> Any:
        return await behave(await argument(raw, context), context)

    async def answer_all(raw: Any, context: Any) -> AsyncIterator[Any]:
        async for response in behave(await argument(raw, context), context):
            yield response

    return of_same_kind(handler, answer_all if inspect.isasyncgenfunction(behave) else answer)


def of_same_kind(handler: Any, behave: Callable[[Any, Any], Any]) -> Any:
    """A handler that gives requests as bytes to `behave`, and is otherwise as `handler`."""
    make = getattr(grpc, f"{_kind_of(handler)}_rpc_method_handler")
    return make(behave, response_serializer=handler.response_serializer)


def _kind_of(handler: Any) -> str:
    """As in gRPC's names, e.g. "unary_stream"."""
    request, response = handler.request_streaming, handler.response_streaming
    return f"{'stream' if request else 'unary'}_{'stream' if response else 'unary'}"
