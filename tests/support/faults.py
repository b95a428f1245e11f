"""Helpers of the fault tests: a stream that ends with tokens or a typed error.

A fault test makes its fault and proves that the fault happened. Then it checks `right` (the exact tokens) or `typed`
(an error before the deadline, after only right tokens), `settle` (no block in use within the lease), and `serves_on` (a
new request through the remaining workers).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
from dataclasses import replace
from typing import Any, Self

import grpc
import grpc.aio

from core.config import EngineConfig, TandemConfig, TransferConfig
from core.request import Request, SamplingParams
from engine.fake_runner import FakeRunner, expected_tokens
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.deployment import SLACK_S, Answer, make_request, tiny_config, trailers_of

LEASE_S = 2.0  # a busy machine delays a process by less than this
TYPED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}

Prompt = tuple[int, ...]


def fault_config(
    transport: str = "memory",
    *,
    lease_s: float = LEASE_S,
    **router: object,
) -> TandemConfig:
    """Short leases and short time limits, so that a test sees both end."""
    patience: dict[str, object] = {"worker_wait_s": 4.0, "report_stale_s": 2.0, "worker_lost_s": 3.0}
    transfer = TransferConfig(transport=transport, lease_s=lease_s, read_grace_s=1.0, min_bytes_per_s=1e6)
    return replace(tiny_config(**(patience | router)), transfer=transfer)  # type: ignore[arg-type]


def prompt_of(seed: int, num_tokens: int = 70) -> Prompt:
    """Prompts of different seeds share no block. Of one seed, the shorter prompt is a prefix of the longer."""
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 251) for _ in range(num_tokens))


@functools.cache
def expected(prompt: Prompt, num_output: int) -> list[int]:
    """The tokens that the fake runner must answer with."""
    runner = _fake()
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return expected_tokens(Request("reference", prompt, len(prompt), params), runner.layout, runner.info.vocab_size)


@functools.cache
def _fake() -> FakeRunner:
    return FakeRunner.from_config(EngineConfig(model="fake:tiny", dtype="float32", kv_memory_mb=1))


class Stream:
    """One request, read by a background task. Needs a running event loop."""

    def __init__(
        self,
        inference: inference_pb2_grpc.InferenceStub | AsyncClient,
        prompt: Prompt,
        num_output: int = 20,
        timeout_s: float = 20.0,
    ) -> None:
        self.prompt, self.num_output = prompt, num_output
        self.answer = Answer()
        self.code: grpc.StatusCode | None = None  # of the error that ended the stream
        self.details = ""
        self.trailers: dict[str, str] = {}
        self._deadline = time.monotonic() + timeout_s
        self._grown = asyncio.Condition()
        request = make_request(token_ids=prompt, max_tokens=num_output)
        self._call: Any = (
            inference.generate(request, timeout_s)
            if isinstance(inference, AsyncClient)
            else inference.Generate(request, timeout=timeout_s)
        )
        self.reading = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for response in self._call:
                self.answer.take(response)
                async with self._grown:
                    self._grown.notify_all()
        except grpc.aio.AioRpcError as error:
            self.code, self.details = error.code(), error.details() or ""
            self.trailers = trailers_of(error)
        except CallFailed as error:
            self.code, self.details = error.code, str(error)
        except asyncio.CancelledError:
            if self.reading.cancelling():
                raise
            self.code = grpc.StatusCode.CANCELLED

    def cancel(self) -> None:
        self._call.cancel()

    @property
    def num_tokens(self) -> int:
        return len(self.answer.token_ids)

    @property
    def finished(self) -> inference_pb2.Finished:
        return self.answer.finished

    @property
    def ended(self) -> bool:
        return self.reading.done()

    async def reach(self, num_tokens: int, within_s: float = 10.0) -> Self:
        """Wait until so many tokens have arrived."""
        async with asyncio.timeout(within_s), self._grown:
            await self._grown.wait_for(lambda: self.num_tokens >= num_tokens)
        return self

    async def end(self) -> Stream:
        """Wait for any end of the stream, at most until its deadline."""
        async with asyncio.timeout(max(0.0, self._deadline - time.monotonic()) + SLACK_S):
            await self.reading
        return self

    async def right(self) -> Self:
        """Wait for the end. The stream must deliver exactly the right tokens, each once and in order."""
        await self.end()
        assert self.code is None, f"{self.code}: {self.details}"
        assert self.answer.end is not None
        assert self.answer.token_ids == expected(self.prompt, self.num_output)
        assert self.answer.indices == list(range(self.num_output))
        return self

    async def typed(self, *codes: grpc.StatusCode) -> Stream:
        """Wait for the end. The stream must end with one of these errors, and every token before must be right."""
        await self.end()
        assert self.code in (codes or TYPED), f"{self.code}: {self.details}"
        assert self.answer.end is None
        assert self.answer.token_ids == expected(self.prompt, self.num_output)[: self.num_tokens]
        return self


async def serves_on(inference: inference_pb2_grpc.InferenceStub) -> None:
    """A new request, in no prefix cache, must get the right tokens."""
    await Stream(inference, prompt_of(next(_NEW_SEEDS), num_tokens=20), 5).right()


_NEW_SEEDS = itertools.count(100_000)
