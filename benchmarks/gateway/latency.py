"""Measures the latency of tokens over HTTP, beside gRPC calls of the same router.

All sequences of a step sample at the same time. A probe, one direct call, gets the ids of its tokens, which tell when
they were sampled (benchmarks.sleeping_runner.py). So the age of a token of another stream is the time from
the newest known step to its arrival; the steps are further apart than any token is old.
"""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable

from benchmarks.dataplane import load
from benchmarks.dataplane.http2_load import Connection, receive_for
from benchmarks.dataplane.http_load import Arrivals, HttpStream
from benchmarks.dataplane.load import Counter
from benchmarks.sleeping_runner import age_s

TIMEOUT_S = 20.0
WARM_UP_S = 1.0
PROBE_TOKENS = 4_000


def http_streams(port: int, model: str, count: int, max_tokens: int, arrivals: Arrivals | None) -> list[HttpStream]:
    """Streamed completions on connections of their own."""
    streams = [
        HttpStream(port, "/v1/completions", {"model": model, "prompt": load.PROMPT, "seed": 1}) for _ in range(count)
    ]
    for stream in streams:
        stream.arrivals = arrivals
        if max_tokens:
            stream.send(max_tokens)
    return streams


def start_probe(address: str) -> tuple[list[Connection], Counter]:
    counter = Counter(load.tokens_of_response)
    connection = Connection(address, counter.take)
    connection.call(load.GENERATE, load.generate_request(PROBE_TOKENS))
    receive_for([connection], TIMEOUT_S, lambda: counter.num_messages > 0)
    counter.keep = True
    return [connection], counter


def ages_of(times: list[float], probe: Counter) -> list[float]:
    """Seconds from sampling to arrival, of messages within the time of the probe."""
    sampled = sorted(at - age_s(token_id, at) for at, ids in probe.tokens() for token_id in ids)
    return [at - sampled[index - 1] for at in times if 0 < (index := bisect_right(sampled, at)) < len(sampled)]


def http_ages(
    port: int, model: str, router: str, num_streams: int, seconds: float, num_stalled: int = 0
) -> list[float]:
    """`num_stalled` further clients send a request, and read nothing."""
    arrivals = Arrivals()
    probe, counter = start_probe(router)
    stalled = http_streams(port, model, num_stalled, load.ENDLESS, None)
    streams = http_streams(port, model, num_streams, load.ENDLESS, arrivals)
    receive_for([*streams, *probe], seconds / 2)
    arrivals.times.clear()
    receive_for([*streams, *probe], seconds)
    load.close([*streams, *stalled, *probe])
    return ages_of(arrivals.times, counter)


def grpc_ages(router: str, num_streams: int, seconds: float) -> list[float]:
    arrivals = Arrivals()
    probe, counter = start_probe(router)
    connections = [Connection(router, lambda *_: arrivals.add(1)) for _ in range(load.NUM_CONNECTIONS)]
    for index in range(num_streams):
        connections[index % len(connections)].call(load.GENERATE, load.generate_request(load.ENDLESS))
    receive_for([*connections, *probe], seconds / 2)
    arrivals.times.clear()
    receive_for([*connections, *probe], seconds)
    load.close([*connections, *probe])
    return ages_of(arrivals.times, counter)


def first_tokens_s(
    port: int, model: str, router: str, num_streams: int, num_requests: int, step_s: float
) -> tuple[float, float]:
    """Median times from a request of one token to that token: over HTTP, and over gRPC.

    The requests take turns, beside streams over HTTP, on connections that are open already. A random pause before each
    keeps the requests out of step with the worker, which would count whole steps as a difference.
    """
    draw, own = random.Random(num_requests), Arrivals()
    streams = http_streams(port, model, num_streams, load.ENDLESS, None)
    [through_http] = http_streams(port, model, 1, 0, own)
    direct = Connection(router, lambda _, message: own.add(len(load.tokens_of_response(message))))
    readers: list[HttpStream | Connection] = [*streams, through_http, direct]
    receive_for(readers, WARM_UP_S)
    ways: tuple[tuple[Callable[[], object], Callable[[], int]], ...] = (  # asks, and the answers that have ended
        (lambda: through_http.send(1), lambda: through_http.num_ended),
        (lambda: direct.call(load.GENERATE, load.generate_request(1)), lambda: len(direct.ended)),
    )
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(1, num_requests + 1):
        for (ask, num_ended), seconds in zip(ways, found, strict=True):
            receive_for(readers, draw.uniform(0.0, 2 * step_s))
            own.times.clear()
            start = time.monotonic()
            ask()
            receive_for(readers, TIMEOUT_S, lambda: num_ended() == number)  # noqa: B023 (called at once)
            seconds.append(own.times[0] - start)
    load.close(readers)
    return statistics.median(found[0]), statistics.median(found[1])
