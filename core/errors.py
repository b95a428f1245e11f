"""Every error Tandem raises on purpose, sorted by whose fault it is.

`InvalidRequest` is the caller's fault and is also a `ValueError`; it names the field and the limit.
All other `TandemError`s are operating faults: they carry a code, and say whether trying again can help.
A failed `assert` is our own bug and is never caught.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """What kind of fault; each maps to the gRPC status of the same name (runtime/grpc_server.py)."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    UNAUTHENTICATED = "unauthenticated"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class TandemError(Exception):
    """An operating fault with a code; `retryable` says whether the same request may succeed if sent again."""

    code = ErrorCode.INTERNAL
    retryable = False
    field = ""  # of the request, where one is to blame


class InvalidRequest(TandemError, ValueError):
    """The caller's request breaks a rule. `field` is the request field, `message` states the limit it broke."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelNotFound(TandemError):
    code = ErrorCode.NOT_FOUND
    field = "model"


class Unauthenticated(TandemError):
    """The caller did not show the cluster's token."""

    code = ErrorCode.UNAUTHENTICATED


class QueueFull(TandemError):
    """A bounded queue has no room. `retry_after_s` is a hint for the client."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TandemError):
    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelled(TandemError):
    code = ErrorCode.CANCELLED


class WorkerUnavailable(TandemError):
    """A worker died, drains, or none is there."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class TransferFailed(TandemError):
    """The KV hand-off ended without its blocks; the request can be prefilled again."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class TransportError(TandemError):
    """A transport could not do what it was asked."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class PeerDisconnected(TransportError):
    """The peer's process or machine is gone."""


class LayoutMismatch(TandemError):
    """Two pools whose KV layouts cannot be translated. `differences` names each field with both values."""

    code = ErrorCode.FAILED_PRECONDITION

    def __init__(self, differences: dict[str, tuple[object, object]]) -> None:
        listed = ", ".join(f"{name}: {ours!r} here, {theirs!r} there" for name, (ours, theirs) in differences.items())
        super().__init__(f"KV layouts differ in {listed}")
        self.differences = differences


class ConfigError(TandemError, ValueError):
    """The operator's configuration cannot work; the message says which option to change."""

    code = ErrorCode.FAILED_PRECONDITION
