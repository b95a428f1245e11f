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
ANSWER_S = 30.0  # seconds of Prometheus for each of seven queries; beyond: `ConfigError`
MAX_SHOWN = 300  # characters of the server's own error

Series = list[tuple[str, float]]  # label `le` of each, or empty


def read_prometheus(url: str, labels: str, window_s: float, num: int) -> Load:
    """`num` requests like those of the last `window_s` seconds. `labels` select series, as `model_name="llama"`.

    Raises `ConfigError`.
    """
    try:
        endpoint = Endpoint.parse(url, os.environ.get(KEY_VARIABLE, ""))
        return asyncio.run(_read(endpoint, labels, window_s, num))
    except ValueError as error:
        raise ConfigError(f"--prometheus: {error}") from error


async def _read(endpoint: Endpoint, labels: str, window_s: float, num: int) -> Load:
    at = _sum(await _ask(endpoint, "vector(time())"))  # all queries ask for the same time, so that their answers agree

    async def increase(metric: str, by: str = "") -> Series:
        series = f'{{__name__=~"{metric}",{labels}}}[{math.ceil(window_s)}s]'
        return await _ask(endpoint, f"sum{by}(increase({series}))", time=f"{at}")

    async def histogram(metric: str) -> Histogram:
        buckets = sorted((_bound(bound), count) for bound, count in await increase(f"{metric}_bucket", " by (le) "))
        bounds = [bound for bound, _ in buckets]
        counts = list(accumulate((count for _, count in buckets), max))  # sums of rounded numbers may fall a little
        if (num_requests := counts[-1] if counts else 0.0) < MIN_REQUESTS:
            raise ValueError(
                f"{metric}{{{labels}}} has {num_requests:.0f} requests in the last {window_s:g} s, at least "
                f"{MIN_REQUESTS} are needed"
            )
        return Histogram(metric, bounds, counts, _sum(await increase(f"{metric}_sum")))

    prompts, outputs = await histogram(PROMPTS), await histogram(OUTPUTS)
    hits, asked = _sum(await increase(HITS)), _sum(await increase(ASKED))
    return load_of_histograms(endpoint.authority, prompts, outputs, hits / asked if asked else 0.0, window_s, num)


async def _ask(endpoint: Endpoint, query: str, **parameters: str) -> Series:
    """Raises `ValueError` with the reason."""
    call = Call(f"/api/v1/query?{urlencode({'query': query} | parameters)}")
    reply = await exchange(endpoint, call, ANSWER_S)
    if reply.end is not End.COMPLETE:
        raise ValueError(f"{endpoint.url} does not answer: {reply.end.value}")
    try:
        return series_of(reply.status, bytes(reply.body))
    except ValueError as error:
        raise ValueError(f"{endpoint.url} answers with status {reply.status}: {error}") from error


def series_of(status: int, body: bytes) -> Series:
    """The answer to a query. Raises `ValueError` with the server's reason, or for what no Prometheus server says."""
    try:
        answer = json.loads(body)
        if status == 200:
            return [(str(one["metric"].get("le", "")), _number(one["value"][1])) for one in answer["data"]["result"]]
        reason = escaped(str(answer["error"])[:MAX_SHOWN])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reason = "this is not what a Prometheus server answers"
    raise ValueError(reason)


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which no histogram has


def _number(text: str) -> float:
    """Raises `ValueError` unless it is one from 0 on."""
    if not 0.0 <= (number := float(text)) < math.inf:
        raise ValueError(text)
    return number


def _sum(series: Series) -> float:
    return sum(value for _, value in series)
