"""From the headers of an HTTP request to the metadata of a call, which pages of other sites may send a body, and the
stream of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from core.config import ApiKeyConfig, GatewayConfig, TelemetryConfig
from core.errors import Unauthenticated, WorkerUnavailable
from gateway.errors import ApiError, ClientGone
from gateway.formats.form import AnswerForm
from gateway.http.body import WaitingBodies
from gateway.http.connection import EventStream, while_connected
from gateway.http.http_protocol import CONNECTION
from gateway.http.middleware import HttpMiddleware
from gateway.http.tracing import SERVICE
from gateway.metrics import GatewayMetrics, joined
from gateway.routes import calls
from gateway.routes.answering import Call
from gateway.routes.calls import CallContext, call_context, passed_on, read_body
from gateway.schemas.base import Schema
from router.serving.choice_stream import Chunk
from runtime.rpc.api_keys import CLIENT, ApiKeys, hash_of
from runtime.tracing.telemetry import Telemetry
from runtime.validation_threads import ValidationThreads
from tandem_client.stubs.inference_pb2 import GenerateRequest

KEYS = ApiKeys((ApiKeyConfig("alice", hash_of("good")),))
GOOD, BAD = (b"authorization", b"Bearer good"), (b"authorization", b"Bearer bad")
PAGE, FRIEND = b"http://evil.example", b"https://friend.example"


class Body(Schema):
    a: int


def request_with(
    *headers: tuple[bytes, bytes], cors_origins: tuple[str, ...] = (), body: bytes = b'{"a": 1}'
) -> Request:
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        return parts.pop() if parts else await asyncio.Event().wait()  # type: ignore[return-value]

    config = GatewayConfig(cors_origins=cors_origins)
    state = SimpleNamespace(config=config, threads=ValidationThreads(1), waiting_bodies=WaitingBodies())
    scope = {"type": "http", "method": "POST", "headers": list(headers), "app": SimpleNamespace(state=state)}
    return Request(scope, receive)


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
    assert (await read(request_with((b"origin", PAGE), *kind, cors_origins=("*",)))).a == 1


async def test_a_page_that_browsers_let_send_json_may_send_it() -> None:
    for content_type in (b"application/json", b"Application/JSON; charset=utf-8"):
        assert (await read(request_with((b"origin", b"null"), (b"content-type", content_type)))).a == 1


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


# ---- Work beside a watch of the connection


class Connection:
    """`receive` of a request whose body is read."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.closed.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ("result", "done"),
        ("result disconnect", "done"),
        ("result turn disconnect", "done"),
        ("disconnect", "gone"),
        ("disconnect turn turn result", "gone"),
        ("cancel", "cancelled"),
        ("disconnect cancel", "cancelled"),
        ("cancel disconnect", "cancelled"),
        ("disconnect turn cancel", "cancelled"),
        ("cancel turn disconnect", "cancelled"),
        ("result disconnect cancel", "cancelled"),
    ],
)
async def test_the_first_event_decides_and_no_cancellation_comes_later(events: str, outcome: str) -> None:
    connection = Connection()
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve() -> tuple[str, int]:
        try:
            found = await while_connected(connection.receive, result)
        except ClientGone:
            found = "gone"
        await asyncio.sleep(0.02)  # a late cancellation would end it
        task: Any = asyncio.current_task()
        return found, task.cancelling()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    for event in events.split():
        match event:
            case "result":
                if not result.done():  # cancelled, with the work that awaits it
                    result.set_result("done")
            case "disconnect":
                connection.closed.set()
            case "cancel":
                task.cancel()
            case "turn":
                await asyncio.sleep(0)
    try:
        assert await task == (outcome, 0)
    except asyncio.CancelledError:
        assert outcome == "cancelled"


async def test_an_error_of_cancelled_work_leaves_the_task_as_it_was() -> None:
    connection = Connection()

    async def work() -> str:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            raise OSError("the socket is closed") from None
        return "done"

    task: Any = asyncio.current_task()
    asyncio.get_running_loop().call_later(0.01, connection.closed.set)
    with pytest.raises(OSError, match="the socket is closed"):
        await while_connected(connection.receive, work())
    assert task.cancelling() == 0
    await asyncio.sleep(0)


# ---- The middleware ends every refusal, also one whose client still sends its body while the server stops.


def middleware(app: Any, metrics: GatewayMetrics | None = None, authorize: Any = AsyncMock()) -> HttpMiddleware:  # noqa: B008
    telemetry = Telemetry(TelemetryConfig(), SERVICE, "gateway")
    return HttpMiddleware(app, GatewayConfig(), authorize, metrics or GatewayMetrics(), telemetry)


async def test_a_refusal_that_still_receives_a_body_ends_whole_when_the_server_stops() -> None:
    sent, lingers = list[dict[str, Any]](), asyncio.Event()

    async def authorize(_: Any) -> None:
        raise Unauthenticated("unknown")

    async def receive() -> Any:
        lingers.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError("a refused request reaches no route")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"100")]}
    request = asyncio.create_task(middleware(app, authorize=authorize)(scope, receive, send))
    await lingers.wait()
    assert [message.get("more_body") for message in sent] == [None, True]
    request.cancel()
    await asyncio.wait([request])
    assert not request.cancelled(), "uvicorn would log an exception of the application"
    assert request.exception() is None
    assert (sent[0]["status"], sent[-1]["body"], sent[-1]["more_body"]) == (401, b"", False)


@pytest.mark.parametrize(
    ("kind", "num_open"), [(b"text/event-stream; charset=utf-8", 1), (b"application/json", 0), (b"", 0)]
)
async def test_an_answer_counts_as_a_stream_until_its_end(kind: bytes, num_open: int) -> None:
    metrics, found = GatewayMetrics(), list[int]()

    async def app(_: Any, __: Any, send: Any) -> None:
        if kind:  # else the client has left before
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        found.append(metrics.num_open_streams)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    await middleware(app, metrics)(scope, AsyncMock(), AsyncMock())
    assert (found, metrics.num_open_streams) == ([num_open], 0)


# ---- The metrics page of the gateway, alone and with the pages of routers.

METRICS = """# HELP tandem_queued Requests that wait
# TYPE tandem_queued gauge
tandem_queued 3.0
# HELP tandem_requests_total Ended choices
# TYPE tandem_requests_total counter
tandem_requests_total{path="local",end="stop"} 5.0
"""


def test_a_request_is_counted_by_route_and_status() -> None:
    metrics = GatewayMetrics()
    metrics.count_request("/v1/models", 200, 0.002)
    metrics.count_request("/v1/models", 503, 0.002)
    page = metrics.page([("one:1", METRICS)])
    assert 'tandem_gateway_requests_total{route="/v1/models",status="503"} 1.0' in page
    assert 'tandem_gateway_request_duration_seconds_count{route="/v1/models"} 2.0' in page
    assert page.endswith(METRICS), "the page of the only router, as it is"


def test_no_character_of_a_label_ends_its_line() -> None:
    """The text format ends lines at a newline only, and escapes that one in labels."""
    tenant = "".join(c for c in map(chr, range(0x3000)) if len(f"a{c}b".splitlines()) > 1 and c != "\n")
    page = joined([(name, METRICS.replace("local", tenant)) for name in ("one:1", "two:2")])
    (family,) = (found for found in text_string_to_metric_families(page) if found.name == "tandem_requests")
    assert [sample.labels["path"] for sample in family.samples] == [tenant, tenant]


def test_pages_of_several_routers_are_one_valid_page_with_a_label() -> None:
    page = joined([("one:1", METRICS), ("two:2", METRICS.replace("3.0", "4.0"))])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {sample.labels["router"]: sample.value for sample in families["tandem_queued"].samples} == {
        "one:1": 3.0, "two:2": 4.0,
    }  # fmt: skip
    labels = [sample.labels for sample in families["tandem_requests"].samples]
    assert labels == [{"router": name, "path": "local", "end": "stop"} for name in ("one:1", "two:2")]
    assert page.count("# TYPE tandem_queued") == 1


# ---- A streamed answer holds no more than one part for a client that does not read its beginning, and the calls of a
# request begin and end one after the other.


class Words:
    """A form whose events are the texts."""

    def chunk(self, chunk: Chunk) -> bytes:
        return chunk.text.encode()

    def end(self) -> bytes:
        return b"."


class Client:
    """A connection whose client reads a message each time `may_read` is released."""

    def __init__(self, num_read: int) -> None:
        self.may_read = asyncio.Semaphore(num_read)
        self.is_full = False
        self.received: list[bytes] = []

    async def send(self, message: Any) -> None:
        await self.may_read.acquire()
        self.received.append(message.get("body", b""))

    def write_chunk(self, data: bytes) -> None:
        self.received.append(data)

    async def receive(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("num_read", [0, 1])  # the head
async def test_parts_stay_in_the_router_until_the_client_has_read_the_first_one(num_read: int) -> None:
    client, stream = Client(num_read), EventStream(cast(AnswerForm, Words()), {})
    given, words = 0, [f"word{number} " for number in range(9)]
    ended = asyncio.Event()

    def give() -> None:  # as SinkWriter does
        nonlocal given
        while given < len(words) and not stream.is_full:
            stream.chunk(Chunk(0, given, (1,), words[given]))
            given += 1
        if given < len(words):
            stream.when_room(give)
        else:
            ended.set()

    async def generate() -> None:
        give()
        await ended.wait()

    await stream.begin(generate(), client.receive)
    scope = {"type": "http", "extensions": {CONNECTION: client}}
    answering = asyncio.create_task(stream(scope, client.receive, client.send))
    for _ in range(5):
        await asyncio.sleep(0)
    assert given <= 2
    for _ in words:
        client.may_read.release()
    async with asyncio.timeout(5):
        await answering
    assert b"".join(client.received) == b"".join(word.encode() for word in words) + b"."


async def test_a_call_that_fails_after_its_client_has_gone_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def generate(stream: EventStream) -> None:
        stream.chunk(Chunk(0, 0, (1,), "word"))
        await asyncio.sleep(0)
        raise WorkerUnavailable("gone")

    stream = EventStream(cast(AnswerForm, Words()), {})
    await stream.begin(generate(stream), Client(0).receive)
    await asyncio.wait([stream._generating])
    del stream
    gc.collect()
    assert not caplog.records


class FakeRouter:
    """Begins a call without a pause, as a router does with a short prompt, and refuses call `num_taken`. Calls without
    end are ended by their cancellation, and their refusal waits for `refuse`."""

    def __init__(self, num_taken: int, *, is_endless: bool = False) -> None:
        self.num_begun = self.num_ended = 0
        self.num_taken, self.is_endless = num_taken, is_endless
        self.refuse, self.refused = asyncio.Event(), RuntimeError("refused")

    async def generate(self, *_: object) -> None:
        self.num_begun += 1
        is_refused = self.num_begun > self.num_taken
        try:
            if self.is_endless:
                await (self.refuse if is_refused else asyncio.Event()).wait()
            if is_refused:
                raise self.refused
        finally:
            self.num_ended += not is_refused


@pytest.mark.parametrize(("num_taken", "num_begun"), [(50, 50), (20, 21)])
async def test_the_prompts_of_a_request_begin_in_turns_of_the_loop_until_one_is_refused(
    num_taken: int, num_begun: int
) -> None:
    """256 prompts at once stopped the router for a second, also where it refused the last ones."""
    router = FakeRouter(num_taken)
    generating = asyncio.create_task(call_of(router, 50).generate(cast(Any, None)))
    num_before = 0
    while not generating.done():
        await asyncio.sleep(0)
        assert router.num_begun <= num_before + 1
        num_before = router.num_begun
    assert generating.exception() is (router.refused if num_taken < 50 else None)
    assert router.num_begun == num_begun


@pytest.mark.parametrize("ends_by", ["client", "refusal", "two cancellations"])
async def test_the_prompts_of_a_request_end_in_turns_of_the_loop(ends_by: str) -> None:
    """A client that left 1,000 choices stopped the router for 0.4 s."""
    router = FakeRouter(40, is_endless=True)
    generating = asyncio.create_task(call_of(router, 41).generate(cast(Any, None)))
    while router.num_begun < 41:
        await asyncio.sleep(0)
    router.refuse.set() if ends_by == "refusal" else generating.cancel()
    num_before = 0
    while not generating.done():
        await asyncio.sleep(0)
        if ends_by == "two cancellations" and router.num_ended == 3:
            generating.cancel()
        elif ends_by != "two cancellations":
            assert router.num_ended <= num_before + 1
        num_before = router.num_ended
    assert router.num_ended == 40
    assert generating.cancelled() or generating.exception() is router.refused


def call_of(router: object, num_prompts: int) -> Call:
    model: Any = SimpleNamespace(router=router)
    requests = [GenerateRequest(n=2) for _ in range(num_prompts)]
    return Call("cmpl-a", model, requests, [], None, [], CallContext(1.0, (), "", "", False), {})
