"""Tokens are held back while the next step starts. No token is lost, follows the end, or reaches another call."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from core.config import TelemetryConfig
from core.errors import TandemError, WorkerUnavailable
from core.lifecycle import FinishReason, Stage, Timeline
from core.request import Request, SamplingParams
from core.step import SampledToken
from decode_worker.machine import DecodeArrived, DecodeDone, EmitTokens
from decode_worker.servicer import DecodeServicer
from protos import codec, worker_pb2
from runtime.telemetry import Telemetry

REQUEST = Request("r", (1, 2, 3), 3, SamplingParams(max_tokens=8))


class FakeDriver:
    """Drops every event. `arrived` is set when a call has arrived."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    def now(self) -> float:
        return 0.0

    def ask(self, event: object) -> None:
        assert isinstance(event, DecodeArrived)
        self.arrived.set()

    def post_threadsafe(self, event: object) -> None:
        pass


class Call:
    """One Decode call: its responses and its end."""

    def __init__(self, servicer: DecodeServicer) -> None:
        self.written: asyncio.Queue[worker_pb2.DecodeResponse] = asyncio.Queue()
        wire = worker_pb2.DecodeRequest(sequence=codec.encode_sequence(REQUEST))
        self.task = asyncio.create_task(servicer._serve(wire, cast(Any, self)))

    def time_remaining(self) -> float:
        return 60.0

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, response: worker_pb2.DecodeResponse) -> None:
        self.written.put_nowait(response)


async def opened() -> tuple[DecodeServicer, FakeDriver, Call]:
    servicer, driver = DecodeServicer(60.0, Telemetry(TelemetryConfig(), "decode")), FakeDriver()
    servicer.attach(cast(Any, driver), "decode-0")
    call = Call(servicer)
    await driver.arrived.wait()
    return servicer, driver, call


def emitted(index: int) -> EmitTokens:
    return EmitTokens("r", index, (SampledToken(100 + index),))


def tokens_of(response: worker_pb2.DecodeResponse) -> list[int]:
    return [token.index for token in response.tokens.tokens]


async def cancel(call: Call) -> None:
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)


def test_held_tokens_are_sent_without_another_action() -> None:
    async def scenario() -> None:
        servicer, _, call = await opened()
        assert servicer.perform(emitted(0))
        assert call.written.empty()
        async with asyncio.timeout(10):
            assert tokens_of(await call.written.get()) == [0]
        await cancel(call)

    asyncio.run(scenario())


def test_the_end_of_a_call_comes_after_its_tokens() -> None:
    async def scenario() -> None:
        servicer, _, call = await opened()
        servicer.perform(emitted(0))
        servicer.perform(DecodeDone("r", FinishReason.LENGTH, 0, Timeline(Stage.QUEUE, 0.0), None))
        await call.task
        written = [call.written.get_nowait() for _ in range(call.written.qsize())]
        assert [response.WhichOneof("event") for response in written] == ["tokens", "finished"]

    asyncio.run(scenario())


def test_a_stopping_worker_sends_the_held_tokens() -> None:
    async def scenario() -> None:
        servicer, _, call = await opened()
        servicer.perform(emitted(0))
        servicer.fail_all(WorkerUnavailable("this worker is stopping"))
        with pytest.raises(TandemError, match="stopping"):
            await call.task
        assert tokens_of(call.written.get_nowait()) == [0]

    asyncio.run(scenario())


def test_held_tokens_do_not_reach_a_later_call_with_the_same_id() -> None:
    async def scenario() -> None:
        servicer, driver, call = await opened()
        servicer.perform(emitted(0))
        await cancel(call)
        driver.arrived.clear()
        again = Call(servicer)
        await driver.arrived.wait()
        servicer.perform(emitted(5))
        async with asyncio.timeout(10):
            assert tokens_of(await again.written.get()) == [5]
        await cancel(again)

    asyncio.run(scenario())
