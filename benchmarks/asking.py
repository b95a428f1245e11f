"""Requests to a fleet over the public gRPC API, or to one decode worker as a router, and the times of their tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from protos import codec
from runtime.rpc.grpc_server import open_channel
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2, worker_pb2, worker_pb2_grpc

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model
MAX_MESSAGE_BYTES = 4 << 20
WORKER_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Answer:
    """Times in seconds, one for each token, on the clock of the caller."""

    times: list[float] = field(default_factory=list)
    error: str = ""
    promised_ttft_s: float | None = None  # by the router

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


async def ask(
    client: AsyncClient, prompt: Sequence[int], max_tokens: int, timeout_s: float, start: float, salt: str = ""
) -> Answer:
    """`start`: the zero of the times, by `time.perf_counter`."""
    request = inference_pb2.GenerateRequest(cache_salt=salt)
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    answer = Answer()
    try:
        async for response in client.generate(request, timeout_s):
            if response.HasField("tokens"):
                answer.times += [time.perf_counter() - start] * len(response.tokens.token_ids)
            elif response.finished.HasField("promise"):
                answer.promised_ttft_s = response.finished.promise.ttft_ms / 1e3
    except CallFailed as error:
        answer.error = str(error)
    return answer


def random_prompts(count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)] for _ in range(count)]


async def ask_worker(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All calls at once, as a router makes them. The times count from the first call."""
    channel = open_channel(address, MAX_MESSAGE_BYTES)
    stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]
    tokens = stub.StreamTokens(worker_pb2.StreamTokensRequest(router_id="benchmark", stream_id=1))
    answers = [Answer() for _ in prompts]
    is_open, is_complete = asyncio.Event(), asyncio.Event()

    async def read_tokens() -> None:
        async for message in tokens:
            is_open.set()
            now = time.perf_counter() - start
            for call in message.calls:
                answers[call - 1].times.append(now)
            if all(len(answer.times) == max_tokens for answer in answers):
                is_complete.set()

    async def one(number: int, prompt: Sequence[int]) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(f"r{number}", tuple(prompt), len(prompt), sampling)
        sequence = codec.encode_sequence(request, CallId("benchmark", number))
        await stub.Decode(worker_pb2.DecodeRequest(sequence=sequence, stream_id=1), timeout=WORKER_TIMEOUT_S)

    start = time.perf_counter()
    reading = asyncio.create_task(read_tokens())
    await is_open.wait()
    start = time.perf_counter()
    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts, 1)))
    await asyncio.wait_for(is_complete.wait(), WORKER_TIMEOUT_S)  # the last tokens may come after their calls end
    reading.cancel()
    await channel.close(None)
    return answers
