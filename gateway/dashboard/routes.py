"""The routes of the dashboard: the page, its files, and the JSON that the page polls.

The page and its files are the same for everyone. The JSON passes the viewer's key on, and the router decides.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import grpc
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse

from gateway.calls import passed_on
from gateway.dashboard.feed import Feed, Feeds
from gateway.fleets import ModelUnknown, fleets_of
from tandem_client import CallFailed

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

# The status of a failed call -> (HTTP status, kind of the error: the page decides by it what to offer).
FAILURES = {
    grpc.StatusCode.UNAUTHENTICATED: (401, "key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "key"),
    grpc.StatusCode.NOT_FOUND: (404, "gone"),
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "busy"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "version"),
    grpc.StatusCode.UNAVAILABLE: (503, "unreachable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (503, "unreachable"),
}

router = APIRouter(include_in_schema=False)


@router.get("/dashboard")
async def page(request: Request) -> Response:
    return _file(request, "index.html")


@router.get("/dashboard/static/{name}")
async def static_file(request: Request, name: str) -> Response:
    return _file(request, name)


@router.get("/dashboard/api/fleet")
async def fleet(request: Request, model: str = "") -> JSONResponse:
    """The newest reports of all workers and routers."""
    feed = await _refreshed(request, model)
    if isinstance(feed, JSONResponse):
        return feed
    models = [listed.name for listed in fleets_of(request).listed() if listed.name == listed.model]
    return _json(feed.fleet() | {"models": models})


@router.get("/dashboard/api/requests")
async def requests(
    request: Request, model: str = "", router: str = "", after: int = Query(default=0, ge=0)
) -> JSONResponse:
    """The requests that ended after number `after` of this router, oldest first. At most 512."""
    feed = await _refreshed(request, model)
    return feed if isinstance(feed, JSONResponse) else _json(feed.requests(router, after))


@router.get("/dashboard/api/trace/{trace_id}")
async def trace(request: Request, trace_id: str, model: str = "") -> JSONResponse:
    """The spans of one request, and the candidates that the router compared."""
    try:
        return _json(await _feed(request, model).trace(trace_id))
    except CallFailed as error:
        return _failure(error, 0.0)
    except ModelUnknown as error:
        return _error(404, "invalid", str(error))


async def _refreshed(request: Request, model: str) -> Feed | JSONResponse:
    """The feed for this viewer with data less than a second old, or the answer that says why there is none."""
    feed = _feed(request, model)
    try:
        await feed.refresh()
    except CallFailed as error:
        return _failure(error, feed.failing_s)
    except ModelUnknown as error:
        return _error(404, "invalid", str(error))
    return feed


def _feed(request: Request, model: str) -> Feed:
    state, fleets = request.app.state, fleets_of(request)
    if not hasattr(state, "dashboard"):
        state.dashboard = Feeds()
    feeds: Feeds = state.dashboard
    return feeds.get(model, _authorization(request), lambda: fleets.resolve(model).client)


def _authorization(request: Request) -> str:
    given = request.headers.get("authorization", "")
    if len(given) > MAX_KEY_CHARS:
        raise HTTPException(400, f"authorization: at most {MAX_KEY_CHARS} characters, has {len(given)}")
    return dict(passed_on(request, ("authorization",))).get("authorization", "")


def _failure(error: CallFailed, failing_s: float) -> JSONResponse:
    status, kind = FAILURES.get(error.code, (502, "other"))
    return _error(status, kind, str(error), failing_s)


def _error(status: int, kind: str, message: str, failing_s: float = 0.0) -> JSONResponse:
    return _json({"error": {"kind": kind, "message": message, "failing_s": failing_s}}, status)


def _json(content: object, status: int = 200) -> JSONResponse:
    return JSONResponse(content, status, headers=HEADERS | {"Cache-Control": "no-store"})


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
