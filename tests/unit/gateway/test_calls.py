"""From the headers of an HTTP request to the metadata of a call, and which pages of other sites may send a body."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from core.config import ApiKeyConfig, GatewayConfig
from core.errors import Unauthenticated
from gateway.errors import ApiError
from gateway.routes import calls
from gateway.routes.calls import CallContext, call_context, passed_on, read_body
from gateway.schemas.base import Schema
from runtime.rpc.api_keys import CLIENT, ApiKeys, hash_of
from runtime.validation_threads import ValidationThreads

KEYS = ApiKeys((ApiKeyConfig("alice", hash_of("good")),))
GOOD, BAD = (b"authorization", b"Bearer good"), (b"authorization", b"Bearer bad")
PAGE, FRIEND = b"http://evil.example", b"https://friend.example"


class Body(Schema):
    a: int


def request_with(*headers: tuple[bytes, bytes], cors_origins: tuple[str, ...] = ()) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b'{"a": 1}', "more_body": False}

    config, threads = GatewayConfig(cors_origins=cors_origins), ValidationThreads(1)
    app = SimpleNamespace(state=SimpleNamespace(config=config, threads=threads))
    return Request({"type": "http", "method": "POST", "headers": list(headers), "app": app}, receive)


async def read(request: Request) -> Body:
    return (await read_body(request, Body, lambda _: None))[0]


@pytest.mark.parametrize(
    "headers", [(GOOD, BAD), (BAD, GOOD), (GOOD, GOOD), (GOOD, (GOOD[0], b"")), (GOOD, (GOOD[0], "Bearer é".encode()))]
)
def test_two_keys_are_refused_as_over_grpc(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert KEYS.find(passed_on(request_with(GOOD))) is not None
    with pytest.raises(Unauthenticated):
        KEYS.find(passed_on(request_with(*headers)))


@pytest.mark.parametrize("content_type", [b"text/plain", b"text/plain;charset=UTF-8", b"multipart/form-data", b""])
async def test_a_page_of_another_site_cannot_post_what_browsers_send_unasked(content_type: bytes) -> None:
    """A browser asks before it sends JSON to another site, and the answer without `cors_origins` is no."""
    kind = [(b"content-type", content_type)] if content_type else []
    with pytest.raises(ApiError) as refused:
        await read(request_with((b"origin", PAGE), *kind))
    assert (refused.value.status, refused.value.code) == (403, "permission_denied")
    assert "cors_origins" in refused.value.message
    assert (await read(request_with(*kind))).a == 1, "a program, not a page"
    friendly = request_with((b"origin", FRIEND), *kind, cors_origins=(FRIEND.decode(),))
    assert (await read(friendly)).a == 1
    anybody = request_with((b"origin", PAGE), *kind, cors_origins=("*",))
    assert (await read(anybody)).a == 1


async def test_a_page_that_browsers_let_send_json_may_send_it() -> None:
    for content_type in (b"application/json", b"Application/JSON; charset=utf-8"):
        request = request_with((b"origin", b"null"), (b"content-type", content_type))
        assert (await read(request)).a == 1


def test_a_call_names_the_network_of_its_client_which_no_header_can() -> None:
    request = request_with(GOOD, (CLIENT.encode(), b"forged"))
    request.scope["client"] = ("2001:db8::7", 1)
    assert call_context(request).metadata == (("authorization", "Bearer good"), (CLIENT, "2001:db8::/64"))


@pytest.mark.parametrize(("request_id", "num_matches"), [("x" * 120, 1), ("x" * 121, 0), ("x" * 10**6, 0)])
def test_a_long_request_id_is_refused_by_its_length_alone(
    request_id: str, num_matches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = []

    def noted(_: str, text: str) -> bool:
        matched.append(text)
        return True

    monkeypatch.setattr(re, "fullmatch", noted)
    with pytest.raises(ApiError) if not num_matches else contextlib.nullcontext():
        calls.request_id_of("", request_id, CallContext(1.0, (), "", "", False))
    assert len(matched) == num_matches
