"""`Client` makes the calls of `AsyncClient` in the thread of its caller, without an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from core.errors import QueueFull
from tandem_client import NO_RETRY, AsyncClient, Client, Piece, RetryPolicy
from tandem_client.stubs import inference_pb2
from tests.support.scripted_router import ScriptedRouter, scripted_router

ROOT = Path(__file__).parents[3]
REQUEST = inference_pb2.GenerateRequest(text="hello")
T = TypeVar("T")


@pytest_asyncio.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router(["a", "bc"]) as router:
        yield router


async def in_a_thread(router: ScriptedRouter, use: Callable[[Client], T], retry: RetryPolicy = NO_RETRY) -> T:
    def run() -> T:
        with Client(router.address, retry=retry) as client:
            return use(client)

    async with asyncio.timeout(20.0):
        return await asyncio.to_thread(run)


def test_both_clients_have_the_same_calls() -> None:
    calls = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert calls == {name for name in vars(Client) if not name.startswith("_")} - {"close"}


async def test_calls_answer_and_streams_end_with_a_result(router: ScriptedRouter) -> None:
    def use(client: Client) -> tuple[str, list[Piece], str, int]:
        stream = client.stream("hello")
        pieces = list(stream)
        return client.model().name, pieces, stream.result.text, len(list(client.generate(REQUEST, timeout_s=10.0)))

    name, pieces, text, num_messages = await in_a_thread(router, use)
    assert (name, [piece.text for piece in pieces], text, num_messages) == ("scripted", ["a", "bc"], "abc", 3)


async def test_a_retry_waits_for_its_pause(router: ScriptedRouter) -> None:
    router.failures = [QueueFull("full", retry_after_s=0.2)]
    started_at = asyncio.get_running_loop().time()
    assert (await in_a_thread(router, lambda client: client.complete("hello"), RetryPolicy())).text == "abc"
    assert asyncio.get_running_loop().time() - started_at >= 0.2


def closed(client: Client) -> None:
    with client.stream("hello") as stream:
        assert next(stream).text == "a"


def dropped(client: Client) -> None:
    assert next(client.stream("hello")).text == "a"


def closed_messages(client: Client) -> None:
    responses = client.generate(REQUEST, timeout_s=60.0)
    assert next(responses).tokens.text == "a"
    responses.close()


@pytest.mark.parametrize("leave", [closed, dropped, closed_messages])
async def test_leaving_a_stream_early_cancels_the_request(
    leave: Callable[[Client], None], router: ScriptedRouter
) -> None:
    router.hold = asyncio.Event()

    def use(client: Client) -> None:
        leave(client)
        asyncio.run_coroutine_threadsafe(cancelled(), loop).result(10.0)  # before the client closes

    async def cancelled() -> None:
        while not router.num_cancelled:
            await asyncio.sleep(0.01)

    loop = asyncio.get_running_loop()
    await in_a_thread(router, use)


async def test_the_deadline_and_ctrl_c_end_a_call_that_waits(router: ScriptedRouter) -> None:
    router.hold = asyncio.Event()
    program = f"""
import os, signal, sys, threading
from tandem_client import CallFailed, Client
from tandem_client.blocking import BlockingCall

main = threading.get_ident()
WAITING = {{threading.Condition.wait.__code__, BlockingCall.__anext__.__code__}}

def stack():
    frame = sys._current_frames()[main]
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back

def interrupt_the_wait():
    while not WAITING <= set(stack()):
        pass
    os.kill(os.getpid(), signal.SIGINT)

with Client({router.address!r}) as client:
    try:
        client.complete("hello", timeout_s=0.3)
    except CallFailed as error:
        print(error.code.name)
    stream = client.stream("hello")
    next(stream), next(stream)
    try:
        threading.Thread(target=interrupt_the_wait).start()
        next(stream)
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["DEADLINE_EXCEEDED", "interrupted"], "")
