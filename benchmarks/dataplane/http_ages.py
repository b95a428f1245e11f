"""The age of tokens over HTTP.

All sequences of a step sample at the same time. A probe, one direct call of the same router, gets the ids of its
tokens, which tell when they were sampled (benchmarks/sleeping_runner.py). So the age of a token of another stream is
the time from the newest known step to its arrival; the steps are further apart than any token is old.
"""

from __future__ import annotations

from bisect import bisect_right

from benchmarks.dataplane import load
from benchmarks.dataplane.http2_load import Connection, receive_for
from benchmarks.dataplane.http_load import HttpStream
from benchmarks.dataplane.load import Counter
from benchmarks.sleeping_runner import age_s

TIMEOUT_S = 20.0


def completions(port: int, model: str, count: int, max_tokens: int, times: list[float] | None) -> list[HttpStream]:
    """Streams on connections of their own. `times`: where to note the arrivals of their tokens."""
    body = {"model": model, "prompt": load.PROMPT, "seed": 1}
    streams = [HttpStream(port, "/v1/completions", body, times=times) for _ in range(count)]
    for stream in streams:
        stream.send(max_tokens)
    return streams


def http_ages(port: int, model: str, router: str, num_streams: int, seconds: float) -> list[float]:
    """Seconds from sampling to arrival."""
    probe = Counter(load.tokens_of_response)
    direct = Connection(router, probe.take)
    direct.call(load.GENERATE, load.generate_request(load.ENDLESS))
    receive_for([direct], TIMEOUT_S, lambda: probe.num_messages > 0)
    probe.keep = True
    times: list[float] = []
    streams = completions(port, model, num_streams, load.ENDLESS, times)
    receive_for([*streams, direct], seconds / 2)
    times.clear()
    receive_for([*streams, direct], seconds)
    load.close([*streams, direct])
    sampled = sorted(at - age_s(token_id, at) for at, ids in probe.tokens() for token_id in ids)
    return [at - sampled[index - 1] for at in times if 0 < (index := bisect_right(sampled, at)) < len(sampled)]
