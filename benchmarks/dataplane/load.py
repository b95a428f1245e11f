"""Loads for a router, a worker or a bare server, from calls that generate for the whole time of a measurement."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.dataplane.counting_clients import Connection, HttpStream, LoadFailed, OnMessage, receive_for
from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from protos import codec
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.support.service_process import FIRST_ID, ServiceProcess, age_s

GENERATE = "/tandem.v1.Inference/Generate"
STREAM_TOKENS, DECODE = "/tandem.v1.DecodeWorker/StreamTokens", "/tandem.v1.DecodeWorker/Decode"
NUM_CONNECTIONS = 8
ROUTER_ID = "benchmark"
PROMPT = [FIRST_ID + index for index in range(8)]  # short: the decode worker computes such a prompt itself
FIRST_MESSAGES_TIMEOUT_S, WORKER_TIMEOUT_S = 20.0, 300.0
ENDLESS = 4000  # tokens of a call that must outlive a measurement
MIN_WARM_UP_S = 1.0


@dataclass(slots=True)
class Measured:
    tokens_per_s: float
    messages_per_s: float
    cpu_s_per_token: float  # of the measured process
    ages_s: list[float] = field(default_factory=list)  # of tokens, from sampled to received

    @property
    def tokens_per_message(self) -> float:
        return self.tokens_per_s / self.messages_per_s if self.messages_per_s else 0.0


class Counter:
    """Counts the messages and tokens of `decode`, which returns the token ids of a message."""

    def __init__(self, decode: Callable[[bytes], list[int]]) -> None:
        self._decode = decode
        self.num_messages = 0
        self.packed: list[tuple[float, bytes]] = []  # decoded later: the client must not slow the server
        self.keep = False

    def take(self, _: int, message: bytes) -> None:
        self.num_messages += 1
        if self.keep:
            self.packed.append((time.monotonic(), message))

    def tokens(self) -> list[tuple[float, list[int]]]:
        return [(at, self._decode(message)) for at, message in self.packed]


def measure(connections: list[Connection], counter: Counter, seconds: float, process: ServiceProcess) -> Measured:
    """Receive for `seconds`. Raises `LoadFailed` if a call has ended by then."""
    before = process.cpu_s()
    counter.num_messages, counter.packed, counter.keep = 0, [], True
    elapsed = receive_for(connections, seconds)
    counter.keep = False
    used = process.cpu_s() - before
    if any(connection.ended for connection in connections):
        raise LoadFailed("a call ended during the measurement")
    received = counter.tokens()
    num_tokens = sum(len(ids) for _, ids in received)
    return Measured(
        tokens_per_s=num_tokens / elapsed,
        messages_per_s=counter.num_messages / elapsed,
        cpu_s_per_token=used / max(1, num_tokens),
        ages_s=[age_s(ids[0], at) for at, ids in received if ids],
    )


def start_streams(
    address: str, num_streams: int, message: bytes, counter: Counter, warm_up_s: float
) -> list[Connection]:
    """Open calls of Generate, spread over connections, and wait for the first messages of all of them."""
    connections = [Connection(address, counter.take) for _ in range(NUM_CONNECTIONS)]
    for index in range(num_streams):
        connections[index % len(connections)].call(GENERATE, message)
    receive_for(connections, FIRST_MESSAGES_TIMEOUT_S, lambda: counter.num_messages >= num_streams)
    receive_for(connections, warm_up_s)
    return connections


def generate_request(max_tokens: int) -> bytes:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.sampling.temperature = 0.0
    request.sampling.seed = 1
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    return request.SerializeToString()


def tokens_of_response(message: bytes) -> list[int]:
    return list(inference_pb2.GenerateResponse.FromString(message).tokens.token_ids)


def tokens_of_step(message: bytes) -> list[int]:
    return list(worker_pb2.StepTokens.FromString(message).token_ids)


def open_token_stream(address: str, on_message: OnMessage) -> tuple[Connection, int]:
    """Be a router of a decode worker. Returns the stream that has the tokens of its calls, and the id of the stream."""
    stream, stream_id = Connection(address, on_message), secrets.randbits(63) | 1
    opening = worker_pb2.StreamTokensRequest(router_id=ROUTER_ID, stream_id=stream_id)
    stream.call(STREAM_TOKENS, opening.SerializeToString())
    receive_for([stream], MIN_WARM_UP_S)
    return stream, stream_id


def open_decode_calls(
    address: str, stream_id: int, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> Connection:
    """All at once; their numbers count from 1."""
    calls = Connection(address, lambda *_: None)
    for number, prompt in enumerate(prompts, 1):
        sequence = Request(f"{ROUTER_ID}#{number}", tuple(prompt), len(prompt), sampling)
        wire = codec.encode_sequence(sequence, CallId(ROUTER_ID, number))
        calls.call(DECODE, worker_pb2.DecodeRequest(sequence=wire, stream_id=stream_id).SerializeToString())
    return calls


def start_decode_calls(address: str, num_calls: int, max_tokens: int, counter: Counter) -> list[Connection]:
    """A token stream, and calls whose tokens it carries."""
    stream, stream_id = open_token_stream(address, counter.take)
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    calls = open_decode_calls(address, stream_id, [PROMPT] * num_calls, sampling)
    receive_for([stream, calls], FIRST_MESSAGES_TIMEOUT_S, lambda: counter.num_messages > 0)
    receive_for([stream, calls], MIN_WARM_UP_S)
    return [stream, calls]


def ask_worker(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
    """The times of the tokens of each prompt, in seconds from the first call. The worker guesses no tokens.

    Raises `LoadFailed` if some do not come.
    """
    times: list[list[float]] = [[] for _ in prompts]

    def take(_: int, message: bytes) -> None:
        now = time.perf_counter() - start
        for call in worker_pb2.StepTokens.FromString(message).calls:
            times[call - 1].append(now)

    start = time.perf_counter()
    stream, stream_id = open_token_stream(address, take)
    start = time.perf_counter()
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, speculation=False)
    calls = open_decode_calls(address, stream_id, prompts, sampling)
    receive_for([stream, calls], WORKER_TIMEOUT_S, lambda: all(len(found) == max_tokens for found in times))
    receive_for([calls], WORKER_TIMEOUT_S, lambda: len(calls.ended) == len(prompts))  # until then, its id is taken
    close([stream, calls])
    if any(len(found) != max_tokens for found in times):
        raise LoadFailed(f"{sum(map(len, times))} of {len(prompts)} x {max_tokens} tokens came")
    return times


def repeat_ended_calls(connections: list[Connection], message: bytes, seconds: float) -> tuple[int, float]:
    """Replace each call that ends by a new one. Returns the ended calls and the seconds that have passed."""
    num_ended, start = 0, time.perf_counter()
    while (left := start + seconds - time.perf_counter()) > 0:
        receive_for(connections, left, lambda: any(connection.ended for connection in connections))
        for connection in connections:
            for _ in range(len(connection.ended)):
                connection.call(GENERATE, message)
            num_ended += len(connection.ended)
            connection.ended.clear()
    return num_ended, time.perf_counter() - start


def http_ages(port: int, model: str, router: str, num_streams: int, seconds: float) -> list[float]:
    """The ages of tokens over HTTP: seconds from sampling to arrival.

    All sequences of a step sample at the same time. A probe, one direct call of the same router, gets the ids of its
    tokens, which tell when they were sampled (`token_id_at`). So the age of a token of another stream is the time from
    the newest known step to its arrival; the steps are further apart than any token is old.
    """
    probe = Counter(tokens_of_response)
    direct = Connection(router, probe.take)
    direct.call(GENERATE, generate_request(ENDLESS))
    receive_for([direct], FIRST_MESSAGES_TIMEOUT_S, lambda: probe.num_messages > 0)
    probe.keep = True
    times: list[float] = []
    streams = [HttpStream(port, model, times=times) for _ in range(num_streams)]
    for stream in streams:
        stream.send(ENDLESS)
    receive_for([*streams, direct], seconds / 2)
    times.clear()
    receive_for([*streams, direct], seconds)
    close([*streams, direct])
    sampled = sorted(at - age_s(token_id, at) for at, ids in probe.tokens() for token_id in ids)
    return [at - sampled[index - 1] for at in times if 0 < (index := bisect_right(sampled, at)) < len(sampled)]


def close(connections: Sequence[Connection | HttpStream]) -> None:
    for connection in connections:
        connection.socket.close()
