"""What a Prometheus server may answer to `tandem advise`: anything."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.commands import prometheus_load
from cli.commands.prometheus_load import KEY_VARIABLE, PROMPTS, read_prometheus, series_of
from core.errors import ConfigError

SUM = f'sum(increase({{__name__=~"{PROMPTS}_sum",}}[60s]))'
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "result", "metric", "value", "le", "error"]), inner, max_size=4)
    ),
)


@given(st.sampled_from([200, 400, 503]), JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_any_answer_is_read_or_refused(status: int, body: bytes) -> None:
    with contextlib.suppress(ValueError):
        for bound, count in series_of(status, body):
            assert isinstance(bound, str)
            assert count >= 0.0


@contextlib.contextmanager
def server_that_says(status: int, body: bytes, heads: list[str]) -> Iterator[str]:
    """Its URL. `heads` gets query and authorization of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heads.append(parse_qs(urlsplit(self.path).query)["query"][0])
            heads.append(str(self.headers["authorization"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "answers with status 200: this is not what a Prometheus server answers"),
        (200, b"[" * 100_000, "answers with status 200: this is not what a Prometheus server answers"),
        (200, b" " * (5 << 20), "does not answer: too large"),
        (422, b'{"error": "a\\u001bz"}', r"answers with status 422: a\x1bz"),
        (200, b'{"data": {"result": []}}', "vllm[:_]request_prompt_tokens{} has 0 requests in the last 60 s"),
        (200, b'{"data": {"result": [{"metric": {"le": "+Inf"}, "value": [0, "500"]}]}}', "has no finite bound"),
        (200, b'{"data": {"result": [{"metric": {}, "value": [0, "500"]}]}}', "bounds must rise"),
    ],
)
def test_an_answer_without_a_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, message: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    heads: list[str] = []
    with server_that_says(status, body, heads) as url, pytest.raises(ConfigError) as refused:
        read_prometheus(url, "", 60.0, 100)
    assert message in str(refused.value)
    assert heads[:2] == ["vector(time())", "Bearer secret"]
    assert set(heads[2::2]) <= {f'sum by (le) (increase({{__name__=~"{PROMPTS}_bucket",}}[60s]))', SUM}


def test_a_server_that_is_silent_or_not_there_is_named(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setattr(prometheus_load, "ANSWER_S", 0.2)
    with pytest.raises(ConfigError, match="does not answer: no connection"):
        read_prometheus(f"127.0.0.1:{unused_tcp_port}", "", 60.0, 100)
    with pytest.raises(ConfigError, match="is no URL of HTTP"):
        read_prometheus("ftp://here", "", 60.0, 100)
