"""The load of every benchmark that has few streams: requests over the public gRPC API, and the times of their tokens.
Loads of many streams, and of one worker, are in benchmarks/dataplane/load.py, which only counts.

TTFT = the first time; TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model
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
    client: AsyncClient, prompt: Sequence[int], max_tokens: int, timeout_s: float, start: float, salt: str = ""
) -> Answer:
    return await Answer().receive(client, request_of(prompt, max_tokens, cache_salt=salt), timeout_s, start)


def arrivals(rate: float, count: int) -> list[float]:
    """Random times, `rate` a second: the same ones for every system and repeat."""
    chance = random.Random(f"arrivals at {rate:g}")
    return list(accumulate(chance.expovariate(rate) for _ in range(count)))


def random_prompts(count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)] for _ in range(count)]
