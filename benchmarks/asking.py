"""The load of every benchmark that has few streams: requests over the public gRPC API, or to one decode worker as a
router, and the times of their tokens. Loads of many streams are in benchmarks/dataplane/load.py, which only counts.

TTFT = the first time; TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc.aio

from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from protos import codec
from runtime.rpc.grpc_server import open_channel
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2, worker_pb2, worker_pb2_grpc

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model
MAX_MESSAGE_BYTES = 4 << 20
WORKER_TIMEOUT_S = 300.0
BEGUN_TOKENS = 8  # an answer with more of them has begun


@dataclass(slots=True, eq=False)
class Answer:
    """Times in seconds, one for each token, on the clock of the caller."""

    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    finished: inference_pb2.Finished | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)  # or has ended

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def promised_ttft_s(self) -> float | None:
        """By the router."""
        is_promised = self.finished is not None and self.finished.HasField("promise")
        return self.finished.promise.ttft_ms / 1e3 if self.finished is not None and is_promised else None

    async def receive(
        self, client: AsyncClient, request: inference_pb2.GenerateRequest, timeout_s: float, start: float = 0.0
    ) -> Answer:
        """`start`: the zero of the times, by `time.perf_counter`."""
        try:
            async for response in client.generate(request, timeout_s):
                if response.HasField("tokens"):
                    self.times += [time.perf_counter() - start] * len(response.tokens.token_ids)
                    self.token_ids += response.tokens.token_ids
                    self.text += response.tokens.text
                elif response.HasField("finished"):
                    self.finished = response.finished
                if len(self.times) > BEGUN_TOKENS:
                    self.has_begun.set()
        except CallFailed as error:
            self.error = str(error)
        self.has_begun.set()
        return self


def request_of(prompt: Sequence[int] | str, max_tokens: int, salt: str = "") -> inference_pb2.GenerateRequest:
    """Greedy, with exactly `max_tokens` tokens of output."""
    request = inference_pb2.GenerateRequest(cache_salt=salt)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens, True
    return request


async def ask(
    client: AsyncClient, prompt: Sequence[int], max_tokens: int, timeout_s: float, start: float, salt: str = ""
) -> Answer:
    return await Answer().receive(client, request_of(prompt, max_tokens, salt), timeout_s, start)


def random_prompts(count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)] for _ in range(count)]


async def ask_worker(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All calls at once, as a router makes them, and without guesses. The times count from the first call."""
    channel = open_channel(address, MAX_MESSAGE_BYTES)
    stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
    tokens = stub.StreamTokens(worker_pb2.StreamTokensRequest(router_id="benchmark", stream_id=1))
    answers = [Answer() for _ in prompts]
    is_open, complete = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def or_fail(work: Awaitable[None]) -> None:
        try:
            await work
        except grpc.aio.AioRpcError as error:
            if not complete.done():
                complete.set_exception(error)

    async def read_tokens() -> None:
        async for message in tokens:
            is_open.set()
            now = time.perf_counter() - start
            for call in message.calls:
                answers[call - 1].times.append(now)
            if not complete.done() and all(len(answer.times) == max_tokens for answer in answers):
                complete.set_result(None)

    async def one(number: int, prompt: Sequence[int]) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=False)
        request = Request(f"r{number}", tuple(prompt), len(prompt), sampling)
        sequence = codec.encode_sequence(request, CallId("benchmark", number))
        await stub.Decode(worker_pb2.DecodeRequest(sequence=sequence, stream_id=1), timeout=WORKER_TIMEOUT_S)

    start = time.perf_counter()
    tasks = [asyncio.create_task(or_fail(read_tokens()))]
    try:
        await asyncio.wait_for(is_open.wait(), WORKER_TIMEOUT_S)
        start = time.perf_counter()
        tasks += [asyncio.create_task(or_fail(one(number, prompt))) for number, prompt in enumerate(prompts, 1)]
        await asyncio.wait_for(complete, WORKER_TIMEOUT_S)
        await asyncio.wait(tasks[1:], timeout=WORKER_TIMEOUT_S)  # until a call ends, its id is taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await channel.close(None)
    return answers
