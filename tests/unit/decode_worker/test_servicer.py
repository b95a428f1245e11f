"""Tokens go to the stream that their call names. A Decode call lives no longer than its token stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio

from core.errors import InvalidRequest, WorkerUnavailable
from core.lifecycle import FinishReason, Stage, Timeline
from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from core.step import SampledToken, TokenEvent
from decode_worker.events import DecodeCancelled, DecodeDone, EmitTokens
from decode_worker.servicer import DecodeServicer
from protos import codec
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import worker_pb2
from worker.request_check import RequestCheck, refuse_grammars


class FakeDriver:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.is_stopped = False

    def now(self) -> float:
        return 0.0

    def refuse_if_stopped(self) -> None:
        if self.is_stopped:
            raise WorkerUnavailable("this worker has stopped")

    def ask(self, event: object) -> None:
        self.events.append(event)

    def post_threadsafe(self, event: object) -> None:
        self.events.append(event)


class Stream(LocalContext):
    """One StreamTokens call of a router that reads."""

    def __init__(self, servicer: DecodeServicer, stream_id: int) -> None:
        super().__init__(())
        self.written: list[tuple[int, int, int]] = []  # (call, index, token id)
        wire = worker_pb2.StreamTokensRequest(router_id=f"router-{stream_id}", stream_id=stream_id)
        self.task = asyncio.create_task(servicer.StreamTokens(wire, cast(Any, self)))

    async def write(self, message: worker_pb2.StepTokens) -> None:
        self.written += zip(message.calls, message.indexes, message.token_ids, strict=True)


class Scene:
    def __init__(self) -> None:
        self.servicer, self.driver = DecodeServicer(60.0), FakeDriver()
        self.servicer.attach(cast(Any, self.driver), "decode-0", RequestCheck(100, 100, refuse_grammars))
        self.tasks: list[asyncio.Task[Any]] = []

    async def stream(self, stream_id: int) -> Stream:
        stream = Stream(self.servicer, stream_id)
        self.tasks.append(stream.task)
        await turn_the_loop()
        return stream

    async def decode(self, name: str, call: int, stream_id: int) -> asyncio.Task[worker_pb2.DecodeFinished]:
        sequence = codec.encode_sequence(Request(name, (1, 2, 3), 3, SamplingParams(max_tokens=8)), CallId("r", call))
        wire = worker_pb2.DecodeRequest(sequence=sequence, stream_id=stream_id)
        task = asyncio.create_task(self.servicer.Decode(wire, cast(Any, LocalContext((), 60.0))))
        self.tasks.append(task)
        await turn_the_loop()
        return task

    async def emit(self, *tokens: tuple[str, int, int]) -> None:
        """The machine emits (name, index, token id) of one step."""
        step = tuple(TokenEvent(name, index, SampledToken(token_id), None) for name, index, token_id in tokens)
        assert self.servicer.perform(EmitTokens(step))
        await turn_the_loop()

    def cancelled(self) -> set[str]:
        return {event.request_id for event in self.driver.events if isinstance(event, DecodeCancelled)}


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    for task in scene.tasks:
        task.cancel()
    await asyncio.gather(*scene.tasks, return_exceptions=True)


async def turn_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_each_token_goes_to_the_stream_of_its_call(scene: Scene) -> None:
    first, second = await scene.stream(1), await scene.stream(2)
    for name, call, stream_id in (("a", 11, 1), ("b", 12, 2), ("c", 13, 1)):
        await scene.decode(name, call, stream_id)
    await scene.emit(("a", 0, 7), ("b", 0, 8), ("c", 0, 9))
    await scene.emit(("b", 1, 8), ("c", 1, 9))
    assert first.written == [(11, 0, 7), (13, 0, 9), (13, 1, 9)]
    assert second.written == [(12, 0, 8), (12, 1, 8)]


async def test_the_end_of_a_call_says_how_many_tokens_are_on_the_stream(scene: Scene) -> None:
    await scene.stream(1)
    call = await scene.decode("a", 11, 1)
    await scene.emit(("a", 3, 7))
    await scene.emit(("a", 4, 7))
    scene.servicer.perform(DecodeDone("a", FinishReason.LENGTH, 0, Timeline(Stage.QUEUE, 0.0), None))
    assert (await call).num_tokens == 2
    assert not scene.cancelled()


async def test_a_call_without_an_open_stream_is_refused_retryably(scene: Scene) -> None:
    await scene.stream(1)
    with pytest.raises(WorkerUnavailable, match="no token stream 2 is open") as refused:
        await (await scene.decode("a", 11, stream_id=2))
    assert refused.value.retryable
    assert not scene.driver.events, "the machine does not hear of the call"


@pytest.mark.parametrize("stream_id", [0, 1])
async def test_a_stream_needs_an_id_of_its_own(scene: Scene, stream_id: int) -> None:
    first = await scene.stream(1)
    with pytest.raises(InvalidRequest, match="stream_id"):
        await (await scene.stream(stream_id)).task
    await scene.decode("a", 11, 1)
    await scene.emit(("a", 0, 7))
    assert first.written == [(11, 0, 7)], "the open stream goes on"


async def test_the_end_of_a_stream_ends_its_calls_and_no_other(scene: Scene) -> None:
    first, second = await scene.stream(1), await scene.stream(2)
    lost, kept = await scene.decode("a", 11, 1), await scene.decode("b", 12, 2)
    first.task.cancel()
    with pytest.raises(WorkerUnavailable, match="token stream") as ended:
        await lost
    assert ended.value.retryable
    await turn_the_loop()
    assert scene.cancelled() == {"a"}
    assert not kept.done()
    await scene.emit(("a", 0, 7), ("b", 0, 8))
    assert second.written == [(12, 0, 8)]


async def test_a_cancelled_call_cancels_its_sequence(scene: Scene) -> None:
    stream = await scene.stream(1)
    call = await scene.decode("a", 11, 1)
    call.cancel()
    await turn_the_loop()
    assert scene.cancelled() == {"a"}
    await scene.emit(("a", 0, 7))
    assert stream.written == []


async def test_a_stopping_worker_ends_its_calls_and_writes_the_tokens_that_wait(scene: Scene) -> None:
    stream = await scene.stream(1)
    call = await scene.decode("a", 11, 1)
    step = EmitTokens((TokenEvent("a", 0, SampledToken(7), None),))
    scene.servicer.perform(step)
    scene.servicer.fail_all(WorkerUnavailable("this worker is stopping"))
    for task in (call, stream.task):
        with pytest.raises(WorkerUnavailable, match="stopping"):
            await task
    assert stream.written == [(11, 0, 7)]
    scene.driver.is_stopped = True
    with pytest.raises(WorkerUnavailable, match="has stopped"):
        await asyncio.wait_for((await scene.stream(2)).task, 5.0)
