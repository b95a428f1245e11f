"""Every error that Tandem raises on purpose.

`InvalidRequest` is a fault of the caller. It names the field and the limit, and is also a `ValueError`.
Every other `TandemError` is an operating fault with a code; `retryable` says whether a second try can succeed.
A failed `assert` is a bug in Tandem and is never caught.
"""

from __future__ import annotations

from enum import Enum

MAX_NAME_CHARS = 128  # of a client's text within a message
MAX_ERROR_CHARS = 2000  # of a message: gRPC loses a longer status, and a collector refuses a larger span


def shortened(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """A client's text for an error, a span, a log or a header."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def quoted(text: str) -> str:
    """A client's text as part of a message."""
    return repr(shortened(text))


class ErrorCode(Enum):
    """Each code maps to the gRPC status of the same name (runtime/rpc/grpc_server.py)."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"


class TandemError(Exception):
    """An operating fault with a code. `retryable`: the same request may succeed if it is sent again."""

    code = ErrorCode.INTERNAL
    retryable = False
    field = ""  # of the request, if a field caused the error

    def __str__(self) -> str:
        return shortened(super().__str__(), MAX_ERROR_CHARS)


class InvalidRequest(TandemError, ValueError):
    """The request breaks a rule. `field` is the field of the request, and `message` states its limit."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        self.field = shortened(field)
        super().__init__(f"{self.field}: {message}")
        self.message = message


class ModelNotFound(TandemError):
    code = ErrorCode.NOT_FOUND
    field = "model"


class Unauthenticated(TandemError):
    """The call has no valid credentials: the token of the cluster, or an API key."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(TandemError):
    """The call has a valid API key, but the key does not allow this call."""

    code = ErrorCode.PERMISSION_DENIED


class QueueFull(TandemError):
    """A bounded queue is full. `retry_after_s` is a hint for the client."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyLimitReached(QueueFull):
    """An API key has reached one of its limits."""


class DeadlineExceeded(TandemError):
    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelled(TandemError):
    code = ErrorCode.CANCELLED


class WorkerUnavailable(TandemError):
    """The worker died or drains, or there is no worker."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class WorkerDrains(WorkerUnavailable):
    """The worker drains or has changed its role, and has not begun with the request."""


class TokenStreamEnded(WorkerUnavailable):
    """The token stream that a Decode call names has ended."""


class TransferFailed(TandemError):
    """The KV hand-off delivered no blocks. The prompt can be prefilled again."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class TransportError(TandemError):
    """An operation of a transport failed."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class PeerDisconnected(TransportError):
    """The peer's process or machine is gone."""


class OutOfDeviceMemory(TandemError):
    """The step of a sequence needs more memory than its device has free. Another worker may have more."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retryable = True


class DeviceLost(WorkerUnavailable):
    """The device reports an error that lasts until the process ends. The worker must end."""


class LayoutMismatch(TandemError):
    """Two pools whose KV layouts cannot be translated. `differences` names each field with both values."""

    code = ErrorCode.FAILED_PRECONDITION

    def __init__(self, differences: dict[str, tuple[object, object]]) -> None:
        listed = ", ".join(f"{name}: {ours!r} here, {theirs!r} there" for name, (ours, theirs) in differences.items())
        super().__init__(f"KV layouts differ in {listed}")
        self.differences = differences


class ConfigError(TandemError, ValueError):
    """The configuration cannot work. The message names the option to change."""

    code = ErrorCode.FAILED_PRECONDITION
