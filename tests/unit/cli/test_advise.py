"""What `tandem advise` prints, the line and code of each wrong input, and what it reads from a Prometheus."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, unquote_plus, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.commands import prometheus_load
from cli.commands.prometheus_load import (
    KEY_VARIABLE,
    MAX_WINDOW_S,
    OUTPUTS,
    PROMPTS,
    SETTLED_S,
    read_prometheus,
    series_of,
)
from cli.screens.advise_report import Question, as_json_object, limit_of
from conformance.http_exchange import Call, End, Reply
from core.errors import ConfigError
from simulator.advice.advice import Advice, Candidate, Contest
from simulator.advice.goodput import Load, Slo, Trial
from simulator.advice.pools import Job
from simulator.advice.shapes import CostModel, Shape
from simulator.calibration.costs import BUILT_IN, built_in_widths, write_costs
from tests.unit.cli.conftest import Tandem

QUICK = ["--gpus", "2", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "100"]


def log_of(directory: Path, num_requests: int) -> Path:
    chance, path, at = random.Random(5), directory / "calls.jsonl", 1e9
    with path.open("w") as file:
        for _ in range(num_requests):
            at += chance.expovariate(2.0)
            usage = {"prompt_tokens": chance.randint(3000, 5000), "completion_tokens": chance.randint(10, 60)}
            file.write(json.dumps({"timestamp": at, "usage": usage}) + "\n")
    return path


def test_a_log_gets_a_verdict_its_grounds_and_the_price_of_being_wrong(tmp_path: Path, tandem: Tandem) -> None:
    code, shown, _ = tandem("advise", str(log_of(tmp_path, 150)), *QUICK)
    assert code in (0, None)
    assert "calls: 150 requests at 1.93/s" in shown
    assert "1P + 1D" in shown
    assert "1 undivided of 2 GPUs" in shown
    for words in ("Do not split: ", "Price of a split if ", "need no split", "Llama-3.1-8B", "Not modelled: "):
        assert words in shown


def test_the_answer_is_also_one_json_object(tmp_path: Path, tandem: Tandem) -> None:
    costs = tmp_path / "costs.json"
    write_costs(costs, BUILT_IN["h100-8b"])
    by_hand = ["--input-tokens", "8000", "--output-tokens", "20", "--rate", "1"]
    answer = json.loads(tandem("advise", *QUICK, *by_hand, "--costs", str(costs), "--json").out)
    assert answer["verdict"] == "do not split"
    assert answer["rate"] == 1.0
    assert answer["scenarios"][0]["scenario"] == "as modelled"
    assert any("Wider workers were not measured" in sentence for sentence in answer["sentences"])


def test_a_chart_is_drawn_after_the_answer(tmp_path: Path, tandem: Tandem) -> None:
    chart = tmp_path / "attainment.svg"
    command = ("advise", *QUICK, "--input-tokens", "8000", "--output-tokens", "20", "--plot", str(chart))
    chart.symlink_to("/dev/full")
    code, shown, error = tandem(*command)
    assert code == 1
    assert "Do not split" in shown, "a chart that cannot be written costs no answer"
    assert error == f"error: --plot: cannot write {chart}: No space left on device\n"
    chart.unlink()
    tandem(*command)
    drawn = chart.read_text()
    assert drawn.startswith("<?xml")
    assert "<!-- 1P + 1D -->" in drawn


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give the number of GPUs"),
        (["--gpus", "0"], 1, r"the number of GPUs must be in [2, 1024], is 0"),
        (["--gpus", "2", "--slo-tpot-ms", "nan"], 1, "--slo-tpot-ms must be positive and finite, is nan"),
        (["--gpus", "2", "--rate", "-1"], 1, "--rate must be positive and finite, is -1"),
        (["--gpus", "2", "--requests", "0"], 1, "--requests must be positive and finite, is 0"),
        (["--gpus", "2", "--model", "70b"], 1, "there are no costs of h100-70b, only of h100-8b"),
        (["--gpus", "2", "--input-tokens", "1000000000"], 1, "--input-tokens must be at most 320,000, is 1,000,"),
        (["--gpus", "2", "--output-tokens", "1000000000"], 1, "output_tokens must be at most 4,000,000"),
        (["--gpus", "2", "--plot", "/nowhere/a.png"], 1, "the directory of /nowhere/a.png does not exist"),
        (["--gpus", "2", "--plot", "a.txt"], 1, "a.txt: a chart ends in .png or .svg"),
        (["--gpus", "2", "--window-s", "inf"], 1, "--window-s must be positive and finite, is inf"),
        (["a.jsonl", "--gpus", "2", "--prometheus", "x"], 1, "of a log or of --prometheus, not of both"),
        (["--gpus", "2", "--spread", "2"], 1, "spread must be in [0, 1], is 2"),
        (["nowhere.jsonl", "--gpus", "2"], 1, "cannot open nowhere.jsonl: No such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_input_gets_one_line(arguments: list[str], code: int, message: str, tandem: Tandem) -> None:
    ended = tandem("advise", *arguments)
    assert ended.code == code
    assert message in ended.err


def test_a_log_that_is_too_short_is_refused(tmp_path: Path, tandem: Tandem) -> None:
    ended = tandem("advise", str(log_of(tmp_path, 99)), *QUICK)
    assert ended.code == 1
    assert ended.err.startswith("error: calls has 99 requests, at least 100 are needed: give a longer log, or let ")


# ---- words


def trial(late: float, slow: float, busy: tuple[float, float] = (0.9, 0.6), pool_used: float = 0.5) -> Trial:
    return Trial(1.0, 0.5, late, slow, busy, 0.4, pool_used)


@pytest.mark.parametrize(
    ("shape", "beyond", "words"),
    [
        (Shape(1, 1, 8192, 1), trial(0.3, 0.1), "prefill pool 90% busy"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3), "decode pool 60% busy"),
        (Shape(1, 1, 8192, 1), trial(0.0, 0.0), "prefill pool 90% busy"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3, busy=(0.3, 0.1)), "KV waits for the link"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3, pool_used=0.99), "no more room for KV"),
        (Shape(2, 1, 8192), trial(0.3, 0.1), "first tokens are late: 90% busy, 40% of it with prompts"),
        (Shape(2, 1, 8192), trial(0.1, 0.3), "tokens are slow: 40% of the time of steps is prompts"),
        (Shape(2, 1, 8192), trial(0.1, 0.3, pool_used=1.0), "no more room for KV"),
    ],
)  # fmt: skip
def test_the_limit_of_a_shape_names_the_resource(shape: Shape, beyond: Trial, words: str) -> None:
    assert words in limit_of(Candidate(shape, 1.0, beyond))


def test_a_shape_that_misses_at_any_load_blames_no_busy_pool() -> None:
    assert limit_of(Candidate(Shape(2, 1, 8192), 0.0, trial(1.0, 0.0))) == "at any load, first tokens are late"


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([(10.0, 13.0), (10.0, 11.0)], "Split: 1P + 1D carries 13 requests/s, +30% beside the best undivided fleet, "
         "and +10% in the worst scenario."),
        ([(10.0, 13.0), (10.0, 9.0)], "Undecided: a split changes the goodput by -10% (1) to +30% (0), "
         "which is within what the model may err."),
        ([(10.0, 9.0), (10.0, 8.0)], "Do not split: 2 undivided, 8,192 tokens a step carries 10 requests/s; "
         "a split changes that by -20% to -10%."),
        ([(10.0, 9.0), (0.0, 0.0)], "Undecided: in 1 of 2 scenarios (1) no shape keeps these limits at any load."),
        ([(0.0, 0.0), (0.0, 0.0)], "Neither: no shape of 2 GPUs keeps these limits at any load."),
        ([(0.0, 2.0), (10.0, 13.0)], "Split: 1P + 1D carries 2 requests/s, from nothing to something beside the best "
         "undivided fleet, and +30% in the worst scenario."),
    ],
)  # fmt: skip
def test_a_verdict_is_one_sentence(pairs: list[tuple[float, float]], sentence: str) -> None:
    found = (Candidate(Shape(2, 1, 8192), pairs[0][0], trial(0.1, 0.1)),
             Candidate(Shape(1, 1, 8192, 1), pairs[0][1], trial(0.1, 0.1)))  # fmt: skip
    advice = Advice(found, tuple(Contest(str(n), *pair) for n, pair in enumerate(pairs)), 1, 2)
    question = Question(Load("log", [Job(10, 0, 2)], (), None), CostModel(built_in_widths("h100-8b"), 1000),
                        Slo(1.0, 0.1), 2)  # fmt: skip
    answer = as_json_object(question, advice)
    assert answer["sentences"][0] == sentence  # type: ignore[index]
    json.dumps(answer, allow_nan=False)


# ---- What a Prometheus server may answer to `tandem advise`: anything.

SUM = f'sum(increase({{__name__=~"{PROMPTS}_sum",}}[60s]))'


def one_series(named: tuple[str, object]) -> object:
    return {"data": {"result": [{"metric": {"le": named[0]}, "value": [0, named[1]]}]}}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.just(10**400) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "result", "metric", "value", "le", "error"]), inner, max_size=4)
        | st.tuples(st.text(max_size=3), inner).map(one_series)
    ),
)


@given(st.sampled_from([200, 400, 503]), JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_any_answer_is_read_or_refused(status: int, body: bytes) -> None:
    with contextlib.suppress(ValueError):
        for bound, count in series_of(status, body, "le"):
            assert isinstance(bound, str)
            assert 0.0 <= count < math.inf


@contextlib.contextmanager
def server_that_says(
    status: int, body: bytes | Callable[[str], bytes], heads: list[str], location: str = ""
) -> Iterator[str]:
    """Its URL. `heads` gets query and authorization of each request. `body`: that of each query, or of all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)["query"][0]
            answer = body if isinstance(body, bytes) else body(query)
            heads.append(query)
            heads.append(str(self.headers["authorization"]))
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            if location:
                self.send_header("location", location)
            self.end_headers()
            self.wfile.write(answer)

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
        (200, b'{"data": {"result": []}}', "does not tell its time"),
        (200, b'{"data": {"result": [{"metric": {}, "value": [0, "NaN"]}]}}', "a value must be in [0, inf), is nan"),
        (200, b'{"data": {"result": [{"metric": {}, "value": [0, "5"]}]}}', "has 5 requests in the last 60 s"),
        (200, b'{"data": {"result": [{"metric": {"le": "+Inf"}, "value": [0, "500"]}]}}', "has no finite bound"),
        (200, b'{"data": {"result": [{"metric": {}, "value": [0, "500"]}]}}', 'has no bucket le="+Inf"'),
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
    models, buckets = (
        f'sum by ({label}) (increase({{__name__=~"{PROMPTS}_{series}",}}[60s]))'
        for label, series in (("model_name", "count"), ("le", "bucket"))
    )
    assert set(heads[2::2]) <= {models, buckets, SUM}


def test_a_server_that_is_silent_or_not_there_is_named(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setattr(prometheus_load, "ANSWER_S", 0.2)
    with pytest.raises(ConfigError, match="does not answer: no connection"):
        read_prometheus(f"127.0.0.1:{unused_tcp_port}", "", 60.0, 100)
    with pytest.raises(ConfigError, match="must be host:port or a URL of HTTP"):
        read_prometheus("ftp://here", "", 60.0, 100)


def vector(label: str, values: Mapping[str, float]) -> bytes:
    series = [{"metric": {label: name}, "value": [0, repr(value)]} for name, value in values.items()]
    return json.dumps({"data": {"result": series}}).encode()


BUCKETS = {"1000": 100.0, "2000": 400.0, "+Inf": 500.0}

ONE_MODEL = MappingProxyType({"a": 500.0})


def answers(
    prompts: dict[str, float] = BUCKETS,
    outputs: dict[str, float] = BUCKETS,
    total: float = 750_000.0,
    hits: float = 100.0,
    models: Mapping[str, float] = ONE_MODEL,
) -> Callable[[str], bytes]:
    """Those of a Prometheus, by query."""
    found = {
        f"{PROMPTS}_bucket": vector("le", prompts), f"{OUTPUTS}_bucket": vector("le", outputs),
        "_sum": vector("", {"": total}), "_hits_": vector("", {"": hits}), "_queries_": vector("", {"": 400.0}),
        "model_name": vector("model_name", models), "time()": vector("", {"": 1.7e9}),
    }  # fmt: skip
    return lambda query: next(answer for part, answer in found.items() if part in query)


counts = st.floats(0.0) | st.floats(0.0, 1000.0)
odd_buckets = st.dictionaries(st.sampled_from(["", "x", "NaN", "-1", "1", "1.0", "2", "1e308", "+Inf"]), counts)


@given(odd_buckets | st.just(BUCKETS), odd_buckets | st.just(BUCKETS), counts, counts)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_series_are_a_load_or_refused(
    prompts: dict[str, float], outputs: dict[str, float], total: float, hits: float
) -> None:
    answer = answers(prompts, outputs, total, hits)

    async def exchanged(_: object, call: Call, __: float) -> Reply:
        query = unquote_plus(call.path)
        assert "vector(time())" in query or f"time={1.7e9 - SETTLED_S}" in query, "no scrape is on its way then"
        return Reply(200, body=bytearray(answer(query)), end=End.COMPLETE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus_load, "exchange", exchanged)
        try:
            load = read_prometheus("http://here", "", 60.0, 100)
        except ConfigError as error:
            refused = str(error)
        else:
            refused = ""
    assert refused == "" or "vllm" in refused, "the metric is named"
    if refused:
        return
    assert load.rate == pytest.approx(prompts["+Inf"] / 60.0, rel=0.02)
    assert all(0 <= job.num_cached_tokens < job.num_prompt_tokens for job in load.jobs)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answers({"1000": 1000.0, "2000": 10.0, "+Inf": 400.0}), "fall by more than 1%"),
        (answers({"1000": 100.0, "2000": 400.0}), 'prompt_tokens has no bucket le="+Inf"'),
        (answers(outputs={"1000": 1e4, "+Inf": 1e4}), "generation_tokens has 10000, which must be at most"),
        (answers(hits=900.0), "hits_total has 900, which must be at most vllm[:_]prefix_cache_queries_total, 400"),
        (answers(models={"a\x1b[2J": 1.0, "b": 9.0, "c": 0.0}), r"of 2 models, such as a\x1b[2J, b: choose one by"),
    ],
)
def test_series_that_contradict_each_other_are_refused(answer: Callable[[str], bytes], message: str) -> None:
    with server_that_says(200, answer, []) as url, pytest.raises(ConfigError) as refused:
        read_prometheus(url, "", 60.0, 100)
    assert message in str(refused.value)


def test_a_chosen_model_and_a_part_of_a_second_are_answered() -> None:
    with server_that_says(200, answers(models={"a": 1.0, "b": 1.0}), []) as url:
        assert read_prometheus(url, 'model_name="a"', 59.5, 100).rate == 500 / 60
        assert read_prometheus(url, 'model_name="a"', 1e-9, 100).rate == 500, "the server is asked for whole seconds"


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    elsewhere: list[str] = []
    with (
        server_that_says(200, b"{}", elsewhere) as other,
        server_that_says(302, b"", [], location=f"{other}/?query=x") as url,
        pytest.raises(ConfigError, match="status 302"),
    ):
        read_prometheus(url, "", 60.0, 100)
    assert not elsewhere, "the token stays here"


@pytest.mark.parametrize("window_s", [0.0, -1.0, math.nan, math.inf, 1e300, MAX_WINDOW_S * 1.01])
def test_a_window_has_bounds(window_s: float) -> None:
    with pytest.raises(ConfigError, match=r"--window-s must be in \(0, 315,360,000\]"):
        read_prometheus("http://here", "", window_s, 100)


@pytest.mark.parametrize("key", ["a\nb", "a\r\nx: y", "a b", "\udcff", "\x7f"])
def test_an_odd_token_is_refused_without_its_text(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(os, "environ", {KEY_VARIABLE: key})
    with pytest.raises(ConfigError) as refused:
        read_prometheus("http://here", "", 60.0, 100)
    assert str(refused.value) == f"{KEY_VARIABLE} must have printable ASCII characters only, without spaces"
