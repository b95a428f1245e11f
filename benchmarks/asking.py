"""The load of every benchmark that has few streams: requests, and the times of their tokens.

    Answer.receive    over the public gRPC API
    HttpServer.ask    over OpenAI's /v1/completions, of any server
    ask_at            requests that arrive at given times

Loads of many streams, and of one worker, are in benchmarks/dataplane/load.py, which only counts.
TTFT = the first time; TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from conformance.http_exchange import Call, End, Endpoint, Reply, exchange
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2, inference_pb2

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model
TIMEOUT_S, LOOK_S = 300.0, 0.005
BEGUN_TOKENS = 8  # an answer with more of them has begun


@dataclass(slots=True, eq=False)
class Answer:
    """Times in seconds, one for each token, on the clock of the caller; over HTTP, one for each piece of text."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0  # over HTTP, as the server counts them
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)  # empty after an error
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)  # or has ended

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def tpot_s(self) -> float | None:
        """None where one token came, or none."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.times and self.num_tokens > 1 else None

    @property
    def promised_ttft_s(self) -> float | None:
        """By the router."""
        return self.finished.promise.ttft_ms / 1e3 if self.finished.HasField("promise") else None

    async def receive(
        self, client: AsyncClient, request: inference_pb2.GenerateRequest, timeout_s: float = TIMEOUT_S,
        start: float | None = None,
    ) -> Answer:  # fmt: skip
        """`start`: the zero of the times, by `time.perf_counter`; None = now."""
        start, self.error = time.perf_counter() if start is None else start, "the answer has no end"
        try:
            async for response in client.generate(request, timeout_s):
                if response.HasField("tokens"):
                    self.times += [time.perf_counter() - start] * len(response.tokens.token_ids)
                    self.token_ids += response.tokens.token_ids
                    self.text += response.tokens.text
                elif response.HasField("finished"):
                    self.finished, self.error = response.finished, ""
                self.num_tokens = len(self.times)
                if self.num_tokens > BEGUN_TOKENS:
                    self.has_begun.set()
        except CallFailed as error:
            self.error = str(error)
        self.has_begun.set()
        return self


def request_of(
    prompt: Sequence[int] | str, max_tokens: int, temperature: float = 0.0, ignore_eos: bool = True, **fields: Any
) -> inference_pb2.GenerateRequest:
    """Greedy, with exactly `max_tokens` tokens of output, unless the arguments say otherwise."""
    request = inference_pb2.GenerateRequest(**fields)
    if isinstance(prompt, str):
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.temperature = temperature
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens, ignore_eos
    return request


async def ask(
    client: AsyncClient, prompt: Sequence[int], max_tokens: int, timeout_s: float = TIMEOUT_S,
    start: float | None = None, salt: str = "",
) -> Answer:  # fmt: skip
    return await Answer().receive(client, request_of(prompt, max_tokens, cache_salt=salt), timeout_s, start)


def whole(answer: Answer) -> Answer:
    """Raises `RuntimeError` where the answer has failed."""
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


@contextlib.asynccontextmanager
async def streams(
    client: AsyncClient, prompts: Sequence[Sequence[int]], num_output: int, until: str = asyncio.ALL_COMPLETED
) -> AsyncIterator[list[Answer]]:
    """Streams, as soon as all of them have begun, or the first one. The end of the block waits for their ends.

    Their times are those of `time.perf_counter`.
    """
    answers = [Answer() for _ in prompts]
    async with asyncio.TaskGroup() as tasks:
        for answer, prompt in zip(answers, prompts, strict=True):
            tasks.create_task(answer.receive(client, request_of(prompt, num_output), start=0.0))
        await asyncio.wait([tasks.create_task(answer.has_begun.wait()) for answer in answers], return_when=until)
        yield answers


@dataclass(frozen=True, slots=True)
class HttpServer:
    """Of OpenAI's API on this machine, asked with token ids."""

    port: int
    model: str  # its name there

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, timeout_s: float = 120.0, stream: bool = True
    ) -> Answer:
        """Greedy, with exactly `max_tokens` tokens. Never raises: whatever goes wrong is the `error`."""
        answer, start, num_seen = Answer(), time.perf_counter(), 0

        def take(reply: Reply, is_whole: bool = False) -> bool:
            """The lines that have come: events, or a whole answer. Raises `ValueError`."""
            nonlocal num_seen
            end = len(reply.body) if is_whole else reply.body.rfind(b"\n") + 1
            lines, num_seen = bytes(reply.body[num_seen:end]), max(num_seen, end)
            for line in lines.splitlines() if reply.status == 200 else ():
                if (event := line.removeprefix(b"data: ")).startswith(b"{"):
                    take_event(json.loads(event), answer, time.perf_counter() - start)
            return False

        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        call = Call("/v1/completions", json.dumps(body).encode())
        try:
            reply = await exchange(Endpoint("127.0.0.1", self.port, tls=False), call, timeout_s, take)
            take(reply, is_whole=True)
            if reply.status != 200 or reply.end is not End.COMPLETE:
                answer.error = f"{reply.status}, {reply.end.value}: {reply.body[:2000].decode(errors='replace')}"
        except ValueError as error:
            answer.error = str(error)
        if not answer.error and (answer.num_tokens != max_tokens or not answer.times):
            answer.error = f"{answer.num_tokens} of {max_tokens} tokens in {len(answer.times)} pieces of text"
        return answer


def take_event(event: dict[str, Any], answer: Answer, at: float) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    if any(choice.get("text") for choice in event.get("choices", ())):
        answer.times.append(at)
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]


async def ask_at(times: Sequence[float], ask: Callable[[int, float], Awaitable[Answer]]) -> list[Answer]:
    """`ask` takes the number of a request and the zero of its times, once the request arrives."""
    start = time.perf_counter()

    async def one(number: int) -> Answer:
        await asyncio.sleep(start + times[number] - time.perf_counter())
        return await ask(number, start)

    return await asyncio.gather(*map(one, range(len(times))))


async def until(client: AsyncClient, holds: Callable[[cluster_pb2.GetFleetResponse], bool]) -> None:
    """Look at the fleet until the condition holds. Raises `TimeoutError`."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(CallFailed):  # of a router that a roll replaces
                if holds(await client.fleet()):
                    return
            await asyncio.sleep(LOOK_S)


def arrivals(rate: float, count: int) -> list[float]:
    """Random times, `rate` a second: the same ones for every system and repeat."""
    chance = random.Random(f"arrivals at {rate:g}")
    return list(accumulate(chance.expovariate(rate) for _ in range(count)))


def random_prompts(
    count: int, num_tokens: int, seed: int | str = 0, ids: tuple[int, int] = (FIRST_WORD_ID, LAST_WORD_ID)
) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randint(*ids) for _ in range(num_tokens)] for _ in range(count)]
