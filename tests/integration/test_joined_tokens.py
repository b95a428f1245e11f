"""Tokens to the client: the first one at once, later ones joined where the client asks or reads slowly. Joining changes
neither tokens nor text, and a stop string ends the output whether the client reads or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.deployment import Answer, Deployment, deploy, make_request, tiny_config
from tests.support.faults import expected, prompt_of
from tests.support.steps import slow_down
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = prompt_of(1)
NUM_TOKENS = 200
FOR_EVER_MS = 60_000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        slow_down(deployment.decode[0], 0.002)
        yield deployment


def request_of(min_interval_ms: int = 0, **fields: Any) -> inference_pb2.GenerateRequest:
    request = make_request(token_ids=PROMPT, **({"max_tokens": NUM_TOKENS} | fields))
    request.min_interval_ms = min_interval_ms
    return request


async def answer_of(deployment: Deployment, request: inference_pb2.GenerateRequest) -> Answer:
    (answer,) = await deployment.generate_all(request)
    assert answer.indices == list(range(len(answer.token_ids)))
    return answer


async def test_the_first_token_and_the_end_do_not_wait_for_the_interval(deployment: Deployment) -> None:
    """The interval is longer than the test may run."""
    plain = await answer_of(deployment, request_of(logprobs=2))
    joined = await answer_of(deployment, request_of(FOR_EVER_MS, logprobs=2))
    tokens = [chunk for chunk in joined.chunks if chunk.token_ids]
    assert [len(chunk.token_ids) for chunk in tokens] == [1, NUM_TOKENS - 1]
    assert joined.token_ids == plain.token_ids == expected(PROMPT, NUM_TOKENS)
    assert joined.text == plain.text
    entries = [[entry.logprob for chunk in answer.chunks for entry in chunk.logprobs] for answer in (plain, joined)]
    assert entries[0] == entries[1]
    assert len(entries[0]) == NUM_TOKENS


async def stop_string_of(deployment: Deployment) -> tuple[str, int]:
    """A string that first appears far into the text, and the number of tokens before its end."""
    plain = await answer_of(deployment, request_of())
    text = ""
    for chunk in plain.chunks:
        text += chunk.text
        stop, num_tokens = text[-4:], chunk.index + len(chunk.token_ids)
        if num_tokens > NUM_TOKENS / 2 and text.count(stop) == 1 and "\ufffd" not in stop:
            return stop, num_tokens
    raise AssertionError("the text has no such string")


async def test_a_stop_string_ends_the_output_at_the_worker_although_the_client_does_not_read(
    deployment: Deployment,
) -> None:
    """With 20 log-probabilities for each token, 16 choices fill the window of the client before they stop."""
    stop, _ = await stop_string_of(deployment)
    window_bytes, options = 64 * 1024, [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    shell = deployment.router._shell
    async with grpc.aio.insecure_channel(deployment.router_address, options) as channel:
        request = request_of(max_tokens=4000, stop_strings=[stop], logprobs=20, n=16)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60.0)  # type: ignore[no-untyped-call]
        await call.read()
        await until(lambda: not shell.view.num_in_flight, "the stop string has ended every choice", seconds=20.0)
        num_bytes, ends = 0, []
        while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            num_bytes += response.ByteSize()
            if response.HasField("finished"):
                ends.append(response.finished)
    assert num_bytes > 2 * window_bytes, "the router could not write all of it before the client read"
    assert [end.stop_match for end in ends] == [stop] * 16
    assert all(end.usage.completion_tokens < NUM_TOKENS for end in ends)
