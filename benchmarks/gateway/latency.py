"""Measures the latency of tokens over HTTP, beside gRPC calls of the same router.

All sequences of a step sample at the same time. A probe, one direct call, gets the ids of its tokens, which tell when
they were sampled (benchmarks/dataplane/sleeping_runner.py). So the age of a token of another stream is the time from
the newest known step to its arrival; the steps are further apart than any token is old.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import statistics
import time
from bisect import bisect_right
from dataclasses import dataclass, field

from benchmarks.dataplane import load
from benchmarks.dataplane.http2_load import Connection, receive_for
from benchmarks.dataplane.load import Counter
from benchmarks.dataplane.sleeping_runner import age_s

RECEIVE_BYTES = 1 << 18
LAST_BYTES = 32  # of a stream: its last event and the end of the chunks
TIMEOUT_S = 20.0
WARM_UP_S = 1.0
PROBE_TOKENS = 4_000


@dataclass(slots=True)
class Arrivals:
    """When the tokens of all streams arrived. Over HTTP an event counts as one."""

    times: list[float] = field(default_factory=list)

    def add(self, count: int) -> None:
        self.times += [time.monotonic()] * count


class HttpStream:
    """One streamed completion on a connection of its own."""

    def __init__(self, port: int, model: str, max_tokens: int, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._tail = b""
        self.sent_at = time.monotonic()
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = json.dumps({
            "model": model, "prompt": load.PROMPT, "stream": True, "max_tokens": max_tokens, "temperature": 0,
            "seed": 1, "ignore_eos": True,
        }).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def receive(self) -> None:
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise RuntimeError("the server closed a stream")
        self._arrivals.add(data.count(b"data: {"))
        self._tail = (self._tail + data)[-LAST_BYTES:]

    @property
    def ended(self) -> bool:
        return b"data: [DONE]" in self._tail

    def close(self) -> None:
        self.socket.close()


def receive_all(streams: list[HttpStream], probe: list[Connection], seconds: float) -> None:
    """Receive on all streams and on the probe for `seconds`."""
    selector = selectors.DefaultSelector()
    readers: list[HttpStream | Connection] = [*streams, *probe]
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data.receive()
    finally:
        selector.close()


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
    stalled = [HttpStream(port, model, load.ENDLESS, Arrivals()) for _ in range(num_stalled)]
    streams = [HttpStream(port, model, load.ENDLESS, arrivals) for _ in range(num_streams)]
    receive_all(streams, probe, seconds / 2)
    arrivals.times.clear()
    receive_all(streams, probe, seconds)
    readers: list[HttpStream | Connection] = [*streams, *stalled, *probe]
    for reader in readers:
        reader.close()
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

    The requests take turns, beside streams over HTTP, on connections that are open already. A random pause
    before each keeps the requests out of step with the worker, which would count whole steps as a difference.
    """
    draw, own = random.Random(num_requests), Arrivals()
    streams = [HttpStream(port, model, load.ENDLESS, Arrivals()) for _ in range(num_streams)]
    direct = Connection(router, lambda _, message: own.add(len(load.tokens_of_response(message))))
    readers: list[HttpStream | Connection] = [*streams, direct]
    receive_all(streams, [direct], WARM_UP_S)
    found: dict[bool, list[float]] = {True: [], False: []}
    with contextlib.closing(selectors.DefaultSelector()) as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
        for _ in range(num_requests):
            for through in found:
                receive_all(streams, [direct], draw.uniform(0.0, 2 * step_s))
                own.times.clear()
                if through:
                    stream = HttpStream(port, model, 1, own)
                    selector.register(stream.socket, selectors.EVENT_READ, stream)
                start = time.monotonic()
                if not through:
                    direct.call(load.GENERATE, load.generate_request(1))
                while not own.times:
                    for key, _ in selector.select(TIMEOUT_S):
                        key.data.receive()
                found[through].append(own.times[0] - start)
                if through:
                    selector.unregister(stream.socket)
                    stream.close()
                while not through and not direct.ended:
                    direct.receive()
                direct.ended.clear()
    for reader in readers:
        reader.close()
    return statistics.median(found[True]), statistics.median(found[False])
