"""Clients that try to stop, fill, starve or mislead a router. Each does its worst once, and leaves.

Every one is small: a few connections and a few hundred kilobytes. What is tried is how much of a router such a client
gets for that, not how many packets a machine can take. They run in a process of their own, which yields its core to all
others: what they compute themselves would be done on another machine.

    python -m tests.abuse.hostile_clients HTTP_PORT GRPC_ADDRESS KEY SECONDS   # prints what each met, as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.deployment import make_request

HOLDS_S = 3.0  # a client that holds on to something lets go of it then
ANSWER_S = 20.0
GET = b"GET /health HTTP/1.1\r\nhost: here\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@dataclass
class Target:
    http_port: int
    inference: inference_pb2_grpc.InferenceStub
    key: str  # of the hostile tenant
    answers: dict[str, set[str]] = field(default_factory=dict)  # by client

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, path: str, length: int, key: str | None = None) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.key if key is None else key}\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    async def posts(self, path: str, body: bytes, key: str | None = None) -> str:
        """The status line of the answer, read to the end of the first part."""
        async with self.connected() as (reader, writer):
            writer.write(self.head(path, len(body), key) + body)
            async with asyncio.timeout(ANSWER_S):
                return (await reader.readline()).decode("latin-1").strip()

    async def generates(self, request: inference_pb2.GenerateRequest, timeout_s: float = HOLDS_S) -> str:
        call = self.inference.Generate(request, timeout=timeout_s, metadata=(("authorization", f"Bearer {self.key}"),))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


Client = Callable[[Target], Awaitable[str]]
CLIENTS: dict[str, Client] = {}


def client(act: Client) -> Client:
    CLIENTS[act.__name__] = act
    return act


async def drips(parts: Callable[[Target], tuple[bytes, bytes]], target: Target) -> str:
    """Send the first part, and the second again and again until the server closes, or for HOLDS_S."""
    start, piece = parts(target)
    async with target.connected() as (reader, writer):
        writer.write(start)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(HOLDS_S):
                while not (reader.at_eof() or writer.transport.is_closing()):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        return "dripped"


# ---- a connection and its states

DRIPS: dict[str, Callable[[Target], tuple[bytes, bytes]]] = {
    "sends_trailers_without_end": lambda _: (GET + CHUNKED + b"0\r\n", b"x: y\r\n" * 2000),
    "sends_a_head_without_end": lambda _: (GET, b"x: y\r\n" * 100),
    "sends_chunk_extensions_without_end": lambda _: (GET + CHUNKED + b"5;", b"x" * 10_000),
    "announces_a_body_and_sends_a_byte_at_a_time": lambda target: (target.head("/v1/completions", 100_000), b"x"),
    "holds_bodies_without_a_key": lambda target: (target.head("/v1/completions", 2**20, "unknown"), b"x" * 50_000),
    "holds_bodies_with_a_key": lambda target: (target.head("/v1/completions", 2**20), b"x" * 50_000),
}
CLIENTS |= {name: functools.partial(drips, parts) for name, parts in DRIPS.items()}


@client
async def reads_nothing(target: Target) -> str:
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    async with target.connected() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that also reads
        text = json.dumps(body).encode()
        writer.write(target.head("/v1/completions", len(text)) + text)
        await asyncio.sleep(HOLDS_S)
    return "held"


@client
async def reads_late(target: Target) -> str:
    """All that came meanwhile is then due at once."""
    body = {"prompt": "a", "n": 16, "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20}
    async with target.connected() as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        text = json.dumps(body).encode()
        writer.write(target.head("/v1/completions", len(text)) + text)
        await asyncio.sleep(HOLDS_S)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLDS_S):
                while await reader.read(2**16):
                    pass
    return "read"


@client
async def asks_for_pages_and_reads_none(target: Target) -> str:
    async with target.connected() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write((b"GET /dashboard HTTP/1.1\r\nhost: here\r\n\r\n") * 3000)
        await asyncio.sleep(HOLDS_S)
    return "held"


@client
async def leaves_behind_a_pipelined_request(target: Target) -> str:
    body = b'{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true}'
    async with target.connected() as (reader, writer):
        writer.write(target.head("/v1/completions", len(body)) + body + GET + b"\r\n")
        async with asyncio.timeout(ANSWER_S):
            return (await reader.readline()).decode("latin-1").strip()


@client
async def opens_and_leaves(target: Target) -> str:
    for start in (b"", b"\x16\x03\x01\x02", b"GET", GET, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") * 10:
        async with target.connected() as (_, writer):
            writer.write(start)
    return "left"


# ---- the work for what a client sends


_ONES = b",".join([b"1"] * 400_000)
_CHAT = b'{"messages":[{"role":"user","content":"a"}],'
_HARD_BODIES = (
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[' + _ONES + b"]}]}"),
    ("/v1/completions", b'{"prompt":"a","stop":[' + _ONES + b"]}"),
    ("/v1/completions", b'{"prompt":"a","stop_token_ids":["' + b'","'.join([b""] * 200_000) + b'"]}'),
    ("/v1/chat/completions", _CHAT + b'"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    ("/v1/chat/completions", _CHAT + b'"' + b"y" * 900_000 + b'":1}'),
    ("/v1/chat/completions", _CHAT + b",".join(b'"k%d":1' % key for key in range(60_000)) + b"}"),
    ("/v1/completions", b'{"prompt":"a","model":"' + b"m" * 900_000 + b'"}'),
    ("/detokenize", b'{"tokens":[' + _ONES + b"]}"),
)


@client
async def sends_bodies_that_are_hard_to_check(target: Target) -> str:
    found = []
    for path, body in _HARD_BODIES:
        found.append(await target.posts(path, body))
        await target.posts(path, body, key="unknown")
    return ", ".join(found)


@client
async def stops_at_almost_every_character(target: Target) -> str:
    stops = ["a" * 255 + "z", *("a" + chr(98 + index) * 255 for index in range(15))]
    request = make_request(text="aaa", max_tokens=60, n=8, stop_strings=stops, logit_bias={97: 100.0})
    return await target.generates(request)


@client
async def wants_all_log_probabilities_at_once(target: Target) -> str:
    for tokens in (100_000, 200):
        body = {"messages": [{"role": "user", "content": "a"}], "n": 16, "top_logprobs": 20, "logprobs": True}
        found = await target.posts("/v1/chat/completions", json.dumps(body | {"max_tokens": tokens}).encode())
    return found


@client
async def sends_many_tiny_messages(target: Target) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * 30, "max_tokens": 1}).encode()
    return ", ".join({await target.posts("/v1/chat/completions", body) for _ in range(20)})


@client
async def repeats_long_prompts(target: Target) -> str:
    prompts = [chr(97 + index) * 100_000 for index in range(8)]
    body = json.dumps({"prompt": prompts, "n": 16, "max_tokens": 1, "echo": True}).encode()
    return await target.posts("/v1/completions", body)


@client
async def asks_for_a_thousand_choices_at_once(target: Target) -> str:
    found = []
    for num_prompts in (256, 60):
        body = {"prompt": ["a"] * num_prompts, "n": 16, "max_tokens": 1}
        found.append(await target.posts("/v1/completions", json.dumps(body).encode()))
    return ", ".join(found)


@client
async def penalizes_a_long_prompt(target: Target) -> str:
    request = make_request(token_ids=[5 + index % 200 for index in range(6000)], max_tokens=30, n=4)
    request.sampling.repetition_penalty = 1.01
    return await target.generates(request, ANSWER_S)


# ---- grammars

LARK = (
    'start: s\ns: s s s s | s s s | s s | "a"',
    "start: s\ns: s s s | s s | /[a-z ]/ | /[a-z]/",
    'start: "' + '\\"' * 30_000,
    'start: %json {"multipleOf": 1000003}',
)


def _patterns(number: int) -> str:
    return json.dumps({"patternProperties": {f"^a{index}.*b": {} for index in range(number)}})


@client
async def sends_grammars_that_take_long(target: Target) -> str:
    found = set()
    for text in LARK:
        for form in (
            inference_pb2.OutputFormat(lark=text),
            inference_pb2.OutputFormat(lark=json.dumps({"grammars": [{"lark_grammar": text}]})),
        ):
            found.add(
                await target.generates(make_request(text="a", max_tokens=60, output_format=form, ignore_eos=False))
            )
    for schema in (_patterns(400), '{"minItems": 100000, "maxItems": 200000, "type": "array"}'):
        form = inference_pb2.OutputFormat(json_schema=schema)
        found.add(await target.generates(make_request(text="a", max_tokens=10, output_format=form, ignore_eos=False)))
    return ", ".join(sorted(found))


@client
async def resumes_an_ambiguous_text(target: Target) -> str:
    form = inference_pb2.OutputFormat(lark=LARK[0])
    request = make_request(text="a", max_tokens=400, output_format=form, ignore_eos=False)
    request.resume.extend([97] * 300)
    return await target.generates(request)


@client
async def fills_the_memory_with_grammars(target: Target) -> str:
    found = set()
    for salt in range(12):
        names = {f"p{salt}_{index}": {"type": "object", "properties": _twenty(index)} for index in range(25)}
        form = inference_pb2.OutputFormat(json_schema=json.dumps({"type": "object", "properties": names}))
        found.add(await target.generates(make_request(text="a", max_tokens=1, output_format=form, ignore_eos=False)))
    return ", ".join(sorted(found))


def _twenty(index: int) -> dict[str, Any]:
    return {f"q{index}_{number}": {"type": "string"} for number in range(20)}


# ---- what is another's


@client
async def asks_for_pages_under_many_keys(target: Target) -> str:
    async def ask(path: str, key: int) -> str:
        async with target.connected() as (reader, writer):
            writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            async with asyncio.timeout(ANSWER_S):
                return (await reader.readline()).decode("latin-1").strip()

    paths = ("/dashboard/api/requests", "/metrics")
    return ", ".join(sorted(set(await asyncio.gather(*(ask(path, key) for path in paths for key in range(20))))))


@client
async def wants_to_be_first(target: Target) -> str:
    requests = [make_request(text="me " * 20, max_tokens=2, priority=-100) for _ in range(8)]
    return ", ".join(set(await asyncio.gather(*map(target.generates, requests))))


@client
async def writes_into_terminals_and_pages(target: Target) -> str:
    for name in ("a\u2028b", "\x1b[2J", "[/x]", "x" * 100_000, 'a"b\nc'):
        await target.posts("/v1/completions", json.dumps({"prompt": "a", "user": name, "max_tokens": 1}).encode())
        await target.generates(make_request(text="a", max_tokens=1, request_id=name[:200]))
    return "written"


# ---- all of them


async def act_for(target: Target, seconds: float) -> Counter[str]:
    """How often each acted: all at least once, and then in a random order until `seconds` have passed."""
    order, spread, deadline = list(CLIENTS), random.Random(0), time.monotonic() + seconds
    counts: Counter[str] = Counter()

    async def act() -> None:
        while order or time.monotonic() < deadline:
            name = order.pop() if order else spread.choice(list(CLIENTS))
            try:
                target.answers.setdefault(name, set()).add(await CLIENTS[name](target))
            except OSError as error:  # an answer may be late, or its connection be closed
                target.answers.setdefault(name, set()).add(repr(error))
            counts[name] += 1

    await asyncio.gather(*(act() for _ in CLIENTS))
    return counts


async def main(http_port: str, grpc_address: str, key: str, seconds: str) -> None:
    os.nice(19)
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        target = Target(int(http_port), inference, key)
        counts = await act_for(target, float(seconds))
    print(json.dumps({name: (counts[name], sorted(target.answers[name])) for name in counts}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
