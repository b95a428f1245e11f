"""Prompts at the context limit pass through both pools to the last token; one token more is refused by its field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from runtime.rpc.grpc_server import FIELD_KEY
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy
from tests.support.faults import Stream, fault_config, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[64, 65])  # whole blocks, and one token more
async def context(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Deployment, int]]:
    config = fault_config()
    length = request.param
    async with deploy(replace(config, engine=replace(config.engine, max_context=length))) as deployment:
        yield deployment, length


@pytest.mark.parametrize("num_output", [1, 2, 17])
async def test_prompt_and_output_may_fill_the_context(context: tuple[Deployment, int], num_output: int) -> None:
    deployment, length = context
    for _ in range(2):  # the second time with a cached prompt
        stream = Stream(deployment.inference, prompt_of(1, length - num_output), num_output)
        await stream.right()
        assert stream.finished.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    await deployment.settle()


@pytest.mark.parametrize(
    ("missing", "max_tokens", "field"), [(0, 1, "token_ids"), (1, 2, "max_tokens"), (-1, 1, "token_ids")]
)
async def test_one_token_more_than_the_context_is_refused_by_its_field(
    context: tuple[Deployment, int], missing: int, max_tokens: int, field: str
) -> None:
    deployment, length = context
    stream = Stream(deployment.inference, prompt_of(3, length - missing), max_tokens)
    await stream.typed(grpc.StatusCode.INVALID_ARGUMENT)
    assert stream.trailers[FIELD_KEY] == field
    assert str(length) in stream.details
