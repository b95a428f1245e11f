"""One request to a fleet over the public gRPC API, and the time of each of its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model


@dataclass(slots=True)
class Answer:
    """Times in seconds, one for each token, on the clock of the caller."""

    times: list[float] = field(default_factory=list)
    error: str = ""

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
    except CallFailed as error:
        answer.error = str(error)
    return answer
