"""From an HTTP request to a call of a router: its headers, its deadline, its body."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from core.errors import quoted
from gateway.errors import ApiError, api_error, refused
from gateway.http.body import WaitingBodies
from gateway.http.connection import while_connected
from gateway.http.owner import network_of_client, owner_of
from gateway.schemas.base import Schema
from gateway.schemas.json_size import check_size, work_of
from runtime.rpc.api_keys import CLIENT
from runtime.validation_threads import MAX_INLINE_BYTES, ValidationThreads

TIMEOUT_HEADER = "x-tandem-timeout-ms"
RECEIPT_HEADER = "x-tandem-receipt"
TAG_HEADER = "x-tandem-tag"
REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-tandem-warning"
PASSED_ON = ("authorization", "traceparent", "tracestate")  # HTTP headers that become gRPC metadata
MAX_REQUEST_ID_CHARS = 120  # the router takes 128; the calls of several prompts add a number

P = ParamSpec("P")
S = TypeVar("S", bound=Schema)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallContext:
    """The options of a call that the headers of a request set."""

    timeout_s: float
    metadata: tuple[tuple[str, str], ...]
    request_id: str  # of the header; empty without one
    tag: str
    wants_receipt: bool
    min_interval_ms: int = 0


def call_context(request: Request) -> CallContext:
    """Raises `ApiError` for a header out of its limits."""
    headers = request.headers
    return CallContext(
        _timeout_s(request),
        (*passed_on(request), (CLIENT, network_of_client(request.scope))),
        headers.get(REQUEST_ID_HEADER, ""),
        headers.get(TAG_HEADER, ""),
        headers.get(RECEIPT_HEADER, "") in ("1", "true"),
        request.app.state.config.min_interval_ms,
    )


def passed_on(request: Request, names: Sequence[str] = PASSED_ON) -> tuple[tuple[str, str], ...]:
    """The metadata of a gRPC call in the name of the client: every value of a header, because two keys are refused."""
    given = [(name, request.headers.getlist(name)) for name in names]
    return tuple((name, value) for name, values in given if all(map(_is_metadata, values)) for value in values)


def _is_metadata(value: str) -> bool:
    """gRPC carries printable ASCII only. No API key has other characters, so a call without them is refused as well."""
    return bool(value) and value.isascii() and value.isprintable()


def refuse_other_sites(headers: Headers, cors_origins: Collection[str]) -> None:
    """Raise `ApiError` for a body that a page of another site can make a browser send without asking this server.

    Browsers name the page in `origin`, which programs do not send, and ask before they send JSON to another site.
    """
    origin = headers.get("origin")
    if origin is None or "*" in cors_origins or origin in cors_origins:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"a page of {origin[:128]} may send application/json only; gateway.cors_origins lists other pages"
        raise ApiError(403, message, "permission_error", code="permission_denied")


def _timeout_s(request: Request) -> float:
    header = request.headers.get(TIMEOUT_HEADER)
    if header is None:
        default_s: float = request.app.state.config.default_timeout_s
        return default_s
    timeout_ms = float(header) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", header) else math.nan
    if not timeout_ms > 0:
        raise refused(
            TIMEOUT_HEADER, f"must be a number of milliseconds above 0, of at most 12 digits, is {quoted(header)}"
        )
    return timeout_ms / 1e3


def request_id_of(kind: str, in_body: str | None, context: CallContext) -> str:
    """The id of the answer, which is also the name of the request in traces. `kind` begins a new id.

    Raises `ApiError` for a given id that no header of the answer can hold.
    """
    given = in_body or context.request_id
    if not given:
        return f"{kind}{secrets.token_hex(12)}"
    if len(given) > MAX_REQUEST_ID_CHARS or re.fullmatch(r"[!-~]+", given) is None:
        param = "request_id" if in_body else REQUEST_ID_HEADER
        raise refused(param, f"must have 1 to {MAX_REQUEST_ID_CHARS} ASCII characters, without spaces")
    return given


async def read_body(request: Request, schema: type[S], convert: Callable[[S], T]) -> tuple[S, T]:
    """The body and what `convert` makes of it. A body with more than a little work is read in a thread.

    Raises `ApiError` that names the field which breaks the schema, or the page that may not send the body, and the
    errors of `ValidationThreads.run` and `WaitingBodies.hold`.
    """
    refuse_other_sites(request.headers, request.app.state.config.cors_origins)
    body = await request.body()
    work = work_of(body)
    try:
        if work <= MAX_INLINE_BYTES:
            return await beside_the_loop(request, work, _read, body, schema, convert)
        waiting: WaitingBodies = request.app.state.waiting_bodies
        with waiting.hold(request.scope, len(body)):
            reading = beside_the_loop(request, work, _read, body, schema, convert)
            return await while_connected(request.receive, reading)
    except ValidationError as error:
        raise api_error(error) from None


def _read(body: bytes, schema: type[S], convert: Callable[[S], T]) -> tuple[S, T]:
    check_size(body)
    parsed = schema.model_validate_json(body)
    return parsed, convert(parsed)


async def beside_the_loop(
    request: Request, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """As `ValidationThreads.run`, with the time limit of the request."""
    threads: ValidationThreads = request.app.state.threads
    return await threads.run(owner_of(request.scope), _timeout_s(request), num_bytes, function, *args, **kwargs)


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    if not warnings:
        return {}
    text = "; ".join(warnings).encode("ascii", "replace").decode()
    return {WARNING_HEADER: re.sub(r"[^ -~]", "?", text)[:1024]}
