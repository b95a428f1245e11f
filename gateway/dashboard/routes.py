"""The routes of the dashboard: the page, its files, and the JSON that the page polls.

The page and its files are the same for everyone. The JSON passes the viewer's key on, and the router decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import ErrorCode, TandemError, quoted
from gateway.dashboard.feed import Credentials, Feed, Feeds
from gateway.dashboard.views import Json
from gateway.fleets import ModelUnknown, fleets_of
from gateway.formats.encoded import json_pieces
from gateway.routes.calls import passed_on

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
MAX_KEY_CHARS = 1024
MAX_NUMBER_DIGITS = 18

# The status of a failed call -> (HTTP status, kind of the error: the page decides by it what to offer).
FAILURES = {
    ErrorCode.UNAUTHENTICATED: (401, "key"),
    ErrorCode.PERMISSION_DENIED: (403, "key"),
    ErrorCode.NOT_FOUND: (404, "gone"),
    ErrorCode.INVALID_ARGUMENT: (400, "invalid"),
    ErrorCode.RESOURCE_EXHAUSTED: (429, "busy"),
    ErrorCode.UNIMPLEMENTED: (501, "version"),
    ErrorCode.UNAVAILABLE: (503, "unreachable"),
    ErrorCode.DEADLINE_EXCEEDED: (503, "unreachable"),
}


async def page(request: Request) -> Response:
    return _file(request, "index.html")


async def static_file(request: Request) -> Response:
    return _file(request, request.path_params["name"])


async def fleet(request: Request) -> Response:
    """The newest reports of all workers and routers."""
    models = [listed.name for listed in fleets_of(request).listed() if listed.name == listed.model]
    return await _answer(request, lambda feed: feed.fleet() | {"models": models})


async def requests(request: Request) -> Response:
    """The requests that ended after number `after` of this router, oldest first. At most 512."""
    after = request.query_params.get("after", "0")
    if not (after.isascii() and after.isdecimal() and len(after) <= MAX_NUMBER_DIGITS):
        raise HTTPException(400, f"after: must be a number of at most {MAX_NUMBER_DIGITS} digits, is {quoted(after)}")
    return await _answer(request, lambda feed: feed.requests(request.query_params.get("router", ""), int(after)))


async def trace(request: Request) -> Response:
    """The spans of one request, and the candidates that the router compared."""
    try:
        return _json(await _feed(request).trace(request.path_params["trace_id"]))
    except TandemError as error:
        return _failure(error, 0.0)
    except ModelUnknown as error:
        return _error(404, "invalid", str(error))


async def _answer(request: Request, view: Callable[[Feed], Json]) -> Response:
    """`view` of the feed for this viewer, with data less than a second old, or the reason why there is none."""
    feed = _feed(request)
    try:
        await feed.refresh()
    except TandemError as error:
        return _failure(error, feed.failing_s)
    except ModelUnknown as error:
        return _error(404, "invalid", str(error))
    return _json(view(feed))


def _feed(request: Request) -> Feed:
    model, fleets = request.query_params.get("model", ""), fleets_of(request)
    feeds: Feeds = request.app.state.feeds
    return feeds.get(model, _credentials(request), lambda: fleets.resolve(model).router)


def _credentials(request: Request) -> Credentials:
    num_chars = sum(map(len, request.headers.getlist("authorization")))
    if num_chars > MAX_KEY_CHARS:
        raise HTTPException(400, f"authorization: at most {MAX_KEY_CHARS} characters, has {num_chars}")
    return passed_on(request, ("authorization",))


def _failure(error: TandemError, failing_s: float) -> Response:
    status, kind = FAILURES.get(error.code, (502, "other"))
    return _error(status, kind, str(error), failing_s)


def _error(status: int, kind: str, message: str, failing_s: float = 0.0) -> Response:
    return _json({"error": {"kind": kind, "message": message, "failing_s": failing_s}}, status)


def _json(content: Json, status: int = 200) -> Response:
    body = b"".join(json_pieces(content))
    return Response(body, status, HEADERS | {"Cache-Control": "no-store"}, "application/json")


@cache
def _load(name: str) -> tuple[bytes, str]:
    """The bytes of a file of the page, and their ETag. Raises KeyError for any other name."""
    names = {path.name: path for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}
    content = names[name].read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _file(request: Request, name: str) -> Response:
    try:
        content, etag = _load(name)
    except KeyError:
        raise HTTPException(404, "not a file of the dashboard") from None
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


ROUTES = [
    Route("/dashboard", page),
    Route("/dashboard/static/{name}", static_file),
    Route("/dashboard/api/fleet", fleet),
    Route("/dashboard/api/requests", requests),
    Route("/dashboard/api/trace/{trace_id}", trace),
]
