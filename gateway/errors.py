"""Errors as OpenAI's API sends them: {"error": {"message", "type", "param", "code"}}, and the status of the answer.

`api_error` turns each exception of a request into one `ApiError`. An unexpected exception gets an id, which the answer
and the log both name; its text stays in the log.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from core.errors import MAX_ERROR_CHARS, ErrorCode, TandemError, WorkerUnavailable, shortened
from gateway.field_names import http_field
from gateway.fleets import ModelUnknown
from gateway.http.tracing import note_error

log = logging.getLogger(__name__)

MAX_PARAM_CHARS = 256
CLIENT_GONE = 499  # the client has closed the connection, so only the access log shows this status

# Code of an error -> HTTP status, type and code of the answer.
STATUSES: dict[ErrorCode, tuple[int, str, str]] = {
    ErrorCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    ErrorCode.FAILED_PRECONDITION: (400, "invalid_request_error", "failed_precondition"),
    ErrorCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    ErrorCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    ErrorCode.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    ErrorCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorCode.CANCELLED: (CLIENT_GONE, "invalid_request_error", "cancelled"),
    ErrorCode.UNIMPLEMENTED: (501, "server_error", "not_implemented"),
    ErrorCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    ErrorCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}
SERVER_ERROR = (500, "server_error", "internal_error")


class ApiError(Exception):
    """An answer that is not 200."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`message` and `param` are cut: they may hold a text of the client."""
        self.message = shortened(message, MAX_ERROR_CHARS)
        super().__init__(self.message)
        self.status = status
        self.kind = kind
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARS)
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


SERVER_STOPS = "the server stops; send the request again"


class ClientGone(Exception):
    """The client closed its connection before it had the whole answer."""


def server_stops() -> TandemError:
    return WorkerUnavailable(SERVER_STOPS)


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The error for a field of the request that breaks a rule."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """The answer to a request that `error` ended. The trace notes each error, the log an unexpected one."""
    found = _api_error(error)
    note_error(found.code or str(found.status), found.message)
    return found


def _api_error(error: BaseException) -> ApiError:
    match error:
        case ApiError():
            return error
        case TandemError():
            return _of_call(error)
        case ModelUnknown():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case ValidationError():
            return invalid(error)
        case HTTPException():
            return _of_http(error)
        case ClientGone():
            return ApiError(CLIENT_GONE, "the client closed the connection", code="cancelled")
        case _:
            error_id = secrets.token_hex(8)
            log.error("unexpected error %s", error_id, exc_info=error)
            status, kind, code = SERVER_ERROR
            return ApiError(status, f"unexpected error in the gateway; its log names it {error_id}", kind, code=code)


def _of_call(error: TandemError) -> ApiError:
    status, kind, code = STATUSES.get(error.code, SERVER_ERROR)
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if error.code is ErrorCode.RESOURCE_EXHAUSTED and not error.retryable and retry_after_s is None:
        status, kind, code = 413, "invalid_request_error", "request_too_large"
    message, param = str(error), http_field(error.field)
    if error.field and message.startswith(f"{error.field}: "):
        message = f"{param}: {message.removeprefix(f'{error.field}: ')}"
    if error.code is ErrorCode.DEADLINE_EXCEEDED:
        message = "the answer was not complete within the time limit (x-tandem-timeout-ms, gateway.default_timeout_s)"
    if status == 400 and " context of " in message:
        code = "context_length_exceeded"
    headers = {}
    if retry_after_s is not None or (status == 503 and error.retryable):
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 0)))
    if status == 429 or status >= 500:  # the clients of OpenAI retry these, unless this header says otherwise
        headers["x-should-retry"] = "true" if error.retryable else "false"
    return ApiError(status, message, kind, param or None, code, headers)


def invalid(error: ValidationError, *above: str | int) -> ApiError:
    """The first field that is wrong, with its limit. `above` is the path to what was validated.

    A union reports every alternative. The deepest fits best, and of these one that has the right type.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(found, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))
    first = deepest if deepest["loc"][:1] == found[0]["loc"][:1] else found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON: {first['msg']}", code="invalid_json")
    param = _path_of((*above, *first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: is required", param=param, code="missing_required_parameter")
    if first["type"].endswith("_type"):  # no alternative of the union has it
        others = [item["msg"] for item in found if item is not first and _path_of((*above, *item["loc"])) == param]
        message = " or ".join([message, *(other.removeprefix("Input should be ") for other in dict.fromkeys(others))])
    return refused(param or "body", message[:1].lower() + message[1:])


def _path_of(location: tuple[str | int, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content". Names of union alternatives are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch("[a-z_0-9]+", part) and part not in ("str", "int", "float", "bool"):
            path += f".{shortened(part)}" if path else part
    return path


def _of_http(error: HTTPException) -> ApiError:
    message = error.detail or HTTPStatus(error.status_code).phrase
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, message, kind, headers=dict(error.headers or {}))


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"no {request.method} at {request.url.path[:80]}, but {allowed}"
        return ApiError(405, message, code="method_not_supported", headers={"Allow": allowed}).response()
    if isinstance(error, HTTPException) and error.status_code == 404 and error.detail == "Not Found":
        return ApiError(404, f"no route {request.method} {request.url.path}", code="unknown_url").response()
    return api_error(error).response()


# For Starlette: answers every expected error of a route in OpenAI's shape. `HttpMiddleware` answers the others.
HANDLERS: dict[Any, ExceptionHandler] = dict.fromkeys(
    (ApiError, TandemError, ModelUnknown, ClientGone, HTTPException), _answer
)
