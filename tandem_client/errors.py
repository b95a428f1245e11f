"""The one error that a client raises, and the sentences for failures in which no router answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc

# Trailers of a refusal (protos/inference.proto).
FIELD_KEY, RETRYABLE_KEY, RETRY_AFTER_KEY = "tandem-field", "tandem-retryable", "tandem-retry-after-ms"


# Statuses that gRPC gives to the calls of a server that is out of reach, dies, or closes before it has begun them.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class CallFailed(Exception):
    """A call ended with another status than OK. The message is one line that says what to do."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str = "",
        retryable: bool = False,
        retry_after_s: float | None = None,
        lost: bool = False,
        anonymous: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field  # of the request, where one field is to blame
        self.retryable = retryable  # whether the same request may succeed later
        self.retry_after_s = retry_after_s  # the router's hint; None without one
        self.lost = lost  # the router was not reached, or went away: no router has given the status
        self.anonymous = anonymous or message  # the message without the router's address, and without words of gRPC


def call_failed(error: grpc.RpcError, address: str, limit_s: float, streaming: bool = False) -> CallFailed:
    """The `CallFailed` behind a gRPC error. `limit_s`: for all attempts together. `streaming`: the router had answered
    part of the call."""
    code, details = error.code(), error.details() or ""
    trailers = dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ()))
    if RETRYABLE_KEY not in trailers:  # gRPC made the status, not a router
        message, retryable = _explained(code, details, f" at {address}", limit_s, streaming)
        anonymous, _ = _explained(code, details, "", limit_s, streaming)
        return CallFailed(code, message, retryable=retryable, lost=code in _LOST, anonymous=anonymous)
    retry_after_ms = trailers.get(RETRY_AFTER_KEY)
    return CallFailed(
        code,
        details or code.name,
        trailers.get(FIELD_KEY, ""),
        trailers[RETRYABLE_KEY] == "true",
        float(retry_after_ms) / 1e3 if retry_after_ms is not None else None,
    )


def _explained(code: grpc.StatusCode, details: str, place: str, limit_s: float, streaming: bool) -> tuple[str, bool]:
    """(message, retryable). `place`: " at ADDRESS"; or "", then the message quotes no details, which may name it."""
    quoted = f": {details}" if place else ""
    match code:
        case grpc.StatusCode.UNAVAILABLE if streaming:
            return f"the router{place} went away in the middle of the answer; send the request again", True
        case grpc.StatusCode.UNAVAILABLE if "refused" in details:
            return f"no router{place}; start one with `tandem serve`", True
        case grpc.StatusCode.UNAVAILABLE:
            found = f"no answer from the router{place}"
            return f"{found}: it is out of reach, or its TLS settings differ from the client's", True
        case grpc.StatusCode.CANCELLED:
            return f"the router{place} ended the call while it closed; send the request again", True
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from the router{place} within {limit_s:g} s; see `tandem status`", False
        case grpc.StatusCode.UNAUTHENTICATED:
            return f"the router{place} wants its cluster's token{quoted}", False
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"too large a message for the router{place} (router.max_message_bytes){quoted}", False
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"the server{place} is no Tandem router of this version{quoted}", False
        case _:
            return f"the call of the router{place} failed with {code.name}{quoted}", False
