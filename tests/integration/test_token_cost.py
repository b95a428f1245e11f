"""How many calls of Tandem's functions a token takes from the end of a step to the client.

Calls do not depend on the CPU or on what else runs, so a limit of half as much again as was measured holds on every
machine, and a change that doubles the path of a token fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from gateway.fleets import Fleets
from tests.support.deployment import Deployment, deploy, make_request, tiny_config
from tests.support.gateway import serving_gateway
from tests.support.steps import slow_down

NUM_STREAMS, NUM_TOKENS = 16, 60
STEP_S = 0.02  # so long that every message has one token
ROOT = Path(__file__).parents[2]
# Calls a token of all services together, with a sixtieth of what a request and a sixteenth of what a step takes.
MEASURED = {"grpc": 104, "http": 110}


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], STEP_S)
        yield deployment


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """The number of calls of Tandem's own functions, in this thread."""
    own: dict[str, bool] = {}
    calls = [0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name not in own:
                path = Path(name)
                own[name] = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv")
            calls[0] += own[name]

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def calls_per_token(stream: Callable[[int], Awaitable[int]]) -> float:
    """Of streams that run at once, after one that warms up what they use. `stream` returns its number of tokens."""
    await stream(NUM_STREAMS)
    with counted_calls() as calls:
        num_tokens = sum(await asyncio.gather(*map(stream, range(NUM_STREAMS))))
    assert num_tokens == NUM_STREAMS * NUM_TOKENS
    return calls[0] / num_tokens


async def test_a_token_over_grpc_takes_no_more_calls_than_it_did(deployment: Deployment) -> None:
    async def stream(number: int) -> int:
        answer = await deployment.generate_all(make_request(text=f"stream {number}", max_tokens=NUM_TOKENS))
        return len(answer[0].token_ids)

    assert await calls_per_token(stream) < 1.5 * MEASURED["grpc"]


async def test_a_token_over_http_takes_no_more_calls_than_it_did(deployment: Deployment) -> None:
    async with serving_gateway(Fleets([deployment.router.calls])) as url, httpx.AsyncClient(base_url=url) as client:

        async def stream(number: int) -> int:
            fields = {"prompt": f"stream {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
            usage = {"stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/completions", json=fields | usage) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            return int(json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"])

        assert await calls_per_token(stream) < 1.5 * MEASURED["http"]
