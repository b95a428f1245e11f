"""The load of a running vLLM, from the Prometheus server that scrapes it."""

from __future__ import annotations

import asyncio
import json
import math
import os
from itertools import accumulate
from urllib.parse import urlencode

from conformance.http_exchange import Call, End, Endpoint, exchange
from core.errors import ConfigError
from core.plain_text import escaped
from simulator.advice.advice import MIN_REQUESTS
from simulator.advice.goodput import Load
from simulator.advice.histograms import Histogram, load_of_histograms

# vLLM writes a colon. Its client library makes it an underscore where Prometheus asks for OpenMetrics.
PROMPTS, OUTPUTS = "vllm[:_]request_prompt_tokens", "vllm[:_]request_generation_tokens"
HITS, ASKED = "vllm[:_]prefix_cache_hits_total", "vllm[:_]prefix_cache_queries_total"  # tokens
KEY_VARIABLE = "PROMETHEUS_TOKEN"  # environment variable with a bearer token of the server
ANSWER_S = 30.0  # seconds of Prometheus for each of eight queries; beyond: `ConfigError`
MAX_WINDOW_S = 315_360_000.0  # seconds of `--window-s` of `tandem advise`, ten years; beyond: `ConfigError`
# The window ends so many seconds ago: a scrape counts from its begin on, but its values are there at its end. Within
# Prometheus's default `scrape_timeout` it would come between two queries, and each would extrapolate other values.
SETTLED_S = 10.0
MAX_SHOWN = 300  # characters of the server's own error
# Share of the requests by which counts that must be equal or rise may differ: the server extrapolates each, and a vLLM
# that starts again in the window takes some of each bucket with it.
MAX_DIFFERENCE = 0.01

Series = list[tuple[str, float]]  # one label of each, or empty


def read_prometheus(url: str, labels: str, window_s: float, num: int) -> Load:
    """`num` requests like those of the last `window_s` seconds, rounded up. `labels` select series, as
    `model_name="llama"`.

    Raises `ConfigError`.
    """
    if not 0 < window_s <= MAX_WINDOW_S:
        raise ConfigError(f"--window-s must be in (0, {MAX_WINDOW_S:,.0f}], is {window_s:g}")
    key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{KEY_VARIABLE} must have printable ASCII characters only, without spaces")
    try:
        return asyncio.run(_read(Endpoint.parse(url, key), labels, math.ceil(window_s), num))
    except ValueError as error:
        raise ConfigError(f"--prometheus: {error}") from error


async def _read(endpoint: Endpoint, labels: str, window_s: int, num: int) -> Load:
    now = _sum(await _ask(endpoint, "vector(time())"))
    if not now:
        raise ValueError(f"{endpoint.url} does not tell its time")
    at = now - SETTLED_S  # all queries ask for the same time, so that their answers agree

    async def increase(metric: str, by: str = "") -> Series:
        series = f'{{__name__=~"{metric}",{labels}}}[{window_s}s]'
        grouped = f" by ({by}) " if by else ""
        return await _ask(endpoint, f"sum{grouped}(increase({series}))", by, time=f"{at}")

    async def histogram(metric: str) -> Histogram:
        buckets = sorted((_bound(bound), count) for bound, count in await increase(f"{metric}_bucket", "le"))
        found = [count for _, count in buckets]
        counts = list(accumulate(found, max))
        if (num_requests := counts[-1] if counts else 0.0) < MIN_REQUESTS:
            raise ValueError(
                f"{metric}{{{labels}}} has {num_requests:.0f} requests in the last {window_s} s, at least "
                f"{MIN_REQUESTS} are needed"
            )
        if buckets[-1][0] != math.inf:
            raise ValueError(f'{metric} has no bucket le="+Inf"')
        if any(rising - count > MAX_DIFFERENCE * num_requests for rising, count in zip(counts, found, strict=True)):
            raise ValueError(f"{metric} is no histogram: counts of its buckets fall by more than {MAX_DIFFERENCE:.0%}")
        return Histogram(metric, [bound for bound, _ in buckets], counts, _sum(await increase(f"{metric}_sum")))

    if "model_name" not in labels:
        names = sorted(name for name, count in await increase(f"{PROMPTS}_count", "model_name") if count)
        if len(names) > 1:
            raise ValueError(
                f"there are requests of {len(names)} models, such as {escaped(', '.join(names)[:MAX_SHOWN])}: "
                "choose one by --labels 'model_name=\"...\"'"
            )
    prompts, outputs = await histogram(PROMPTS), await histogram(OUTPUTS)
    hits, asked = _sum(await increase(HITS)), _sum(await increase(ASKED))
    for more, less, larger, smaller in (
        (OUTPUTS, PROMPTS, outputs.num_requests, prompts.num_requests),
        (PROMPTS, OUTPUTS, prompts.num_requests, outputs.num_requests),
        (HITS, ASKED, hits, asked),
    ):
        if larger > smaller * (1 + MAX_DIFFERENCE):
            raise ValueError(f"{more} has {larger:g}, which must be at most {less}, {smaller:g}")
    return load_of_histograms(endpoint.authority, prompts, outputs, hits / asked if asked else 0.0, window_s, num)


async def _ask(endpoint: Endpoint, query: str, label: str = "", **parameters: str) -> Series:
    """Raises `ValueError` with the reason."""
    call = Call(f"/api/v1/query?{urlencode({'query': query} | parameters)}")
    reply = await exchange(endpoint, call, ANSWER_S)
    if reply.end is not End.COMPLETE:
        raise ValueError(f"{endpoint.url} does not answer: {reply.end.value}")
    try:
        return series_of(reply.status, bytes(reply.body), label)
    except ValueError as error:
        raise ValueError(f"{endpoint.url} answers with status {reply.status}: {error} (to {query})") from error


def series_of(status: int, body: bytes, label: str) -> Series:
    """The answer to a query. Raises `ValueError` with the server's reason, or for what no Prometheus server says."""
    reason = "this is not what a Prometheus server answers"
    try:
        answer = json.loads(body)
        if status == 200:
            series = [(str(one["metric"].get(label, "")), float(one["value"][1])) for one in answer["data"]["result"]]
            wrong = next((one for one in series if not 0.0 <= one[1] < math.inf), None)
            if wrong is None:
                return series
            reason = f"a value must be in [0, inf), is {wrong[1]:g}" + f" for {label} {wrong[0]!r:.40}" * bool(label)
        else:
            reason = str(answer["error"])[:MAX_SHOWN]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise ValueError(escaped(reason))


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which no histogram has


def _sum(series: Series) -> float:
    return sum(value for _, value in series)
