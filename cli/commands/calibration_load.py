"""The requests of a calibration: they make the workers fit their steps, then measure requests as clients see them.

prompts    lengths from short to long, a few at once     prefill tokens, attended pairs
batches    1, 2, 4, ... requests at once                 sequences in decode, and their context
check      Poisson arrivals at a light load              what the simulation has to predict
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError
from simulator.calibration.calibration import MeasuredRequest
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

SHORTEST_PROMPT = 16
BATCH_OUTPUT_TOKENS = 24
PROMPT_OUTPUT_TOKENS = 2
NUM_ROUNDS = 2  # of the prompts and batches; the first one is also the warm-up


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Sizes of the calibration. Lengths in tokens."""

    longest_prompt: int
    output_tokens: int  # of a request of the check
    largest_batch: int
    num_checked: int
    seed: int
    timeout_s: float  # of a request

    @property
    def lengths(self) -> tuple[int, ...]:
        """Doubling, up to the longest prompt."""
        doubling = [SHORTEST_PROMPT]
        while doubling[-1] * 2 <= self.longest_prompt:
            doubling.append(doubling[-1] * 2)
        return tuple(doubling)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(2**power for power in range(self.largest_batch.bit_length()))


class CalibrationLoad:
    def __init__(self, client: AsyncClient, plan: LoadPlan, vocab_size: int) -> None:
        self._client, self._plan, self._vocab_size = client, plan, vocab_size
        self._chance = random.Random(f"calibration {plan.seed}")

    async def fit(self, num_prefill: int, num_decode: int) -> list[MeasuredRequest]:
        """Prompts and batches, as many at once as there are workers. Returns the prompts of the last round."""
        prompts: list[MeasuredRequest] = []
        for _ in range(NUM_ROUNDS):
            prompts = []
            for length in self._plan.lengths:
                prompts += await self._send_together([length] * max(1, num_prefill), PROMPT_OUTPUT_TOKENS)
            for batch in self._plan.batches:
                lengths = [self._chance.choice(self._plan.lengths) for _ in range(batch * num_decode)]
                await self._send_together(lengths, BATCH_OUTPUT_TOKENS)
        return prompts

    async def check(self, rate: float) -> list[MeasuredRequest]:
        """Poisson arrivals of `rate` requests/s, with lengths between the shortest and the longest prompt."""
        started = time.monotonic()
        tasks, at = [], 0.0
        for _ in range(self._plan.num_checked):
            await asyncio.sleep(max(0.0, started + at - time.monotonic()))
            length = self._chance.randint(SHORTEST_PROMPT, self._plan.longest_prompt)
            tasks.append(asyncio.create_task(self._send(length, self._plan.output_tokens)))
            at += self._chance.expovariate(rate)
        return await asyncio.gather(*tasks)

    async def _send_together(self, lengths: Sequence[int], num_output: int) -> list[MeasuredRequest]:
        return await asyncio.gather(*(self._send(length, num_output) for length in lengths))

    async def _send(self, num_prompt_tokens: int, num_output: int) -> MeasuredRequest:
        """Without drafts, which the costs and the simulator do not know.

        Raises `CallFailed`, and `ConfigError` for an answer without a token.
        """
        request = inference_pb2.GenerateRequest(
            speculation=False,
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=num_output, ignore_eos=True),
        )
        request.token_ids.ids.extend(self._chance.randrange(self._vocab_size) for _ in range(num_prompt_tokens))
        sent_at = time.monotonic()
        first_at = last_at = 0.0
        num_tokens, finished = 0, inference_pb2.Finished()
        async for response in self._client.generate(request, self._plan.timeout_s):
            if response.HasField("finished"):
                finished = response.finished
            elif response.HasField("tokens"):
                last_at = time.monotonic()
                first_at = first_at or last_at
                num_tokens += len(response.tokens.token_ids)
        if not num_tokens:
            raise ConfigError("the router answered a calibration request without a token")
        return MeasuredRequest(
            sent_at=sent_at,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_tokens,
            ttft_s=first_at - sent_at,
            tpot_s=(last_at - first_at) / (num_tokens - 1) if num_tokens > 1 else None,
            in_worker_s=(finished.timings.prefill_queue_ms + finished.timings.prefill_ms) / 1e3,
            transferred_bytes=finished.transferred_bytes,
        )
