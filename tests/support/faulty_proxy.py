"""A proxy before a gateway that has one fault, or none. The check must find each.

async with faulty_proxy(gateway_url, "flips a token") as url:
    ...

Every second request meets the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from typing import Any

import httpx

Message = dict[str, Any]  # a whole answer, or one event of a stream
TIMEOUT_S = 60.0
CLEAR_MARGIN = 0.05  # of a token that is flipped: beyond all rounding of float32


def flips_a_token(message: Message) -> list[Message]:
    for choice in message.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        for place, tops in enumerate(logprobs.get("top_logprobs") or ()):
            best, second = sorted(tops.values(), reverse=True)[:2]
            if best - second > CLEAR_MARGIN:
                token, logprobs["tokens"][place] = logprobs["tokens"][place], "?"
                choice["text"] = choice["text"].replace(token, "?")
    return [message]


def drifts(message: Message) -> list[Message]:
    """The same tokens, from slightly other KV."""
    for choice in message.get("choices", ()):
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        values[:] = [value - 0.5 for value in values]
    return [message]


def counts_wrong(message: Message) -> list[Message]:
    if message.get("usage"):
        message["usage"]["completion_tokens"] += 1
        message["usage"]["total_tokens"] += 1
    return [message]


def finishes_twice(message: Message) -> list[Message]:
    is_last = any(choice.get("finish_reason") for choice in message.get("choices", ()))
    return [message, deepcopy(message)] if is_last and "chunk" in message["object"] else [message]


def gives_each_event_a_role(message: Message) -> list[Message]:
    for choice in message.get("choices", ()):
        if "delta" in choice:
            choice["delta"]["role"] = "assistant"
    return [message]


def answers_with_nothing(message: Message) -> list[Message]:
    for choice in message.get("choices", ()):
        choice |= {"text": "", "logprobs": None, "finish_reason": "stop"}
    if message.get("usage"):
        message["usage"] |= {"completion_tokens": 0, "total_tokens": message["usage"]["prompt_tokens"]}
    return [message] if "chunk" not in message["object"] else []


MESSAGES: dict[str, Callable[[Message], list[Message]]] = {
    "flips a token": flips_a_token,
    "drifts": drifts,
    "counts wrong": counts_wrong,
    "finishes twice": finishes_twice,
    "gives each event a role": gives_each_event_a_role,
    "answers 200 with nothing": answers_with_nothing,
}
OTHERS = ("swaps streams", "keeps requests of clients that left", "has untyped errors", "hangs", "ignores deadlines",
          "cuts streams", "shouts")  # fmt: skip
FAULTS = (*MESSAGES, *OTHERS)


class _Proxy:
    def __init__(self, upstream: httpx.AsyncClient, fault: str) -> None:
        self._upstream, self._fault = upstream, fault
        self._numbers = itertools.count()
        self._last_prompt: object = None
        self._kept: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = head[0].split(" ")
            answer = asyncio.create_task(self._answer(method, path, headers, body, writer))
            left = asyncio.create_task(reader.read())
            await asyncio.wait([answer, left], return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            if self._fault == "keeps requests of clients that left":
                self._kept.append(answer)
            else:
                answer.cancel()
                await asyncio.wait([answer])
        writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        faulty = bool(body) and next(self._numbers) % 2 == 1
        if self._fault == "ignores deadlines":
            headers.pop("x-tandem-timeout-ms", None)
        if self._fault == "swaps streams" and body:
            body = self._of_another(body)
        headers = {
            name: value for name, value in headers.items() if name not in ("host", "connection", "content-length")
        }
        async with self._upstream.stream(method, path, headers=headers, content=body) as answer:
            if self._fault == "has untyped errors" and answer.status_code >= 400:
                writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops")
                return
            kind = answer.headers["content-type"]
            shout = "x-note: " + "x" * 30_000 if self._fault == "shouts" else "x-note: none"
            writer.write(f"HTTP/1.1 {answer.status_code} X\r\ncontent-type: {kind}\r\n{shout}\r\n".encode())
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            pieces = self._events(answer) if "event-stream" in kind else self._whole(answer)
            async for piece in pieces if faulty else answer.aiter_raw():
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    def _of_another(self, body: bytes) -> bytes:
        """Every stream is that of the prompt before."""
        with contextlib.suppress(ValueError):
            fields = json.loads(body)
            if fields.get("stream") and "prompt" in fields:
                fields["prompt"], self._last_prompt = self._last_prompt or fields["prompt"], fields["prompt"]
                return json.dumps(fields).encode()
        return body

    async def _whole(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        data = await answer.aread()
        if self._fault in MESSAGES and answer.status_code == 200:
            (message,) = MESSAGES[self._fault](json.loads(data))
            data = json.dumps(message).encode()
        if self._fault == "shouts":
            data = json.dumps({"error": {"type": "\x1b[31m", "message": "\u2028\x9b2J" * 1_000}}).encode()
        yield data

    async def _events(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        place = 0
        async for line in answer.aiter_lines():
            if not line:
                continue
            place += 1
            if place == 3 and self._fault == "hangs":
                await asyncio.Event().wait()
            if place == 3 and self._fault == "cuts streams":
                raise ConnectionError("cut")
            data = line.removeprefix("data: ")
            if data == "[DONE]" or self._fault not in MESSAGES:
                yield line.encode() + b"\n\n"
                continue
            for message in MESSAGES[self._fault](json.loads(data)):
                yield b"data: " + json.dumps(message).encode() + b"\n\n"

    async def close(self) -> None:
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)


@contextlib.asynccontextmanager
async def faulty_proxy(upstream: str, fault: str = "") -> AsyncIterator[str]:
    """The URL of the proxy."""
    async with httpx.AsyncClient(base_url=upstream, timeout=TIMEOUT_S) as client:
        proxy = _Proxy(client, fault)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await proxy.close()
