"""A streamed answer holds no more than one part for a client that does not read its beginning, and the calls of a
request begin and end one after the other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.formats.form import AnswerForm
from gateway.http.connection import EventStream
from gateway.http.http_protocol import CONNECTION
from gateway.routes.answering import Call
from gateway.routes.calls import CallContext
from router.serving.choice_stream import Chunk
from tandem_client.stubs.inference_pb2 import GenerateRequest


class Words:
    """A form whose events are the texts."""

    def chunk(self, chunk: Chunk) -> bytes:
        return chunk.text.encode()

    def end(self) -> bytes:
        return b"."


class Client:
    """A connection whose client reads a message each time `may_read` is released."""

    def __init__(self, num_read: int) -> None:
        self.may_read = asyncio.Semaphore(num_read)
        self.is_full = False
        self.received: list[bytes] = []

    async def send(self, message: Any) -> None:
        await self.may_read.acquire()
        self.received.append(message.get("body", b""))

    def write_chunk(self, data: bytes) -> None:
        self.received.append(data)

    async def receive(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("num_read", [0, 1])  # the head
async def test_parts_stay_in_the_router_until_the_client_has_read_the_first_one(num_read: int) -> None:
    client, stream = Client(num_read), EventStream(cast(AnswerForm, Words()), {})
    given, words = 0, [f"word{number} " for number in range(9)]
    ended = asyncio.Event()

    def give() -> None:  # as SinkWriter does
        nonlocal given
        while given < len(words) and not stream.is_full:
            stream.chunk(Chunk(0, given, (1,), words[given]))
            given += 1
        if given < len(words):
            stream.when_room(give)
        else:
            ended.set()

    async def generate() -> None:
        give()
        await ended.wait()

    await stream.begin(generate(), client.receive)
    scope = {"type": "http", "extensions": {CONNECTION: client}}
    answering = asyncio.create_task(stream(scope, client.receive, client.send))
    for _ in range(5):
        await asyncio.sleep(0)
    assert given <= 2
    for _ in words:
        client.may_read.release()
    async with asyncio.timeout(5):
        await answering
    assert b"".join(client.received) == b"".join(word.encode() for word in words) + b"."


class FakeRouter:
    """Begins a call without a pause, as a router does with a short prompt, and refuses call `num_taken`. Calls without
    end are ended by their cancellation, and their refusal waits for `refuse`."""

    def __init__(self, num_taken: int, *, is_endless: bool = False) -> None:
        self.num_begun = self.num_ended = 0
        self.num_taken, self.is_endless = num_taken, is_endless
        self.refuse, self.refused = asyncio.Event(), RuntimeError("refused")

    async def generate(self, *_: object) -> None:
        self.num_begun += 1
        is_refused = self.num_begun > self.num_taken
        try:
            if self.is_endless:
                await (self.refuse if is_refused else asyncio.Event()).wait()
            if is_refused:
                raise self.refused
        finally:
            self.num_ended += not is_refused


@pytest.mark.parametrize(("num_taken", "num_begun"), [(50, 50), (20, 21)])
async def test_the_prompts_of_a_request_begin_in_turns_of_the_loop_until_one_is_refused(
    num_taken: int, num_begun: int
) -> None:
    """256 prompts at once stopped the router for a second, also where it refused the last ones."""
    router = FakeRouter(num_taken)
    generating = asyncio.create_task(call_of(router, 50).generate(cast(Any, None)))
    num_before = 0
    while not generating.done():
        await asyncio.sleep(0)
        assert router.num_begun <= num_before + 1
        num_before = router.num_begun
    assert generating.exception() is (router.refused if num_taken < 50 else None)
    assert router.num_begun == num_begun


@pytest.mark.parametrize("ends_by", ["client", "refusal", "two cancellations"])
async def test_the_prompts_of_a_request_end_in_turns_of_the_loop(ends_by: str) -> None:
    """A client that left 1,000 choices stopped the router for 0.4 s."""
    router = FakeRouter(40, is_endless=True)
    generating = asyncio.create_task(call_of(router, 41).generate(cast(Any, None)))
    while router.num_begun < 41:
        await asyncio.sleep(0)
    router.refuse.set() if ends_by == "refusal" else generating.cancel()
    num_before = 0
    while not generating.done():
        await asyncio.sleep(0)
        if ends_by == "two cancellations" and router.num_ended == 3:
            generating.cancel()
        elif ends_by != "two cancellations":
            assert router.num_ended <= num_before + 1
        num_before = router.num_ended
    assert router.num_ended == 40
    assert generating.cancelled() or generating.exception() is router.refused


def call_of(router: object, num_prompts: int) -> Call:
    model: Any = SimpleNamespace(router=router)
    requests = [GenerateRequest(n=2) for _ in range(num_prompts)]
    return Call("cmpl-a", model, requests, [], None, [], CallContext(1.0, (), "", "", False), {})
