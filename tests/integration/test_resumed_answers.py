"""An answer that is resumed at another router, at any index, is the answer that nothing disturbed.

The client has the first tokens of an answer and the text that they complete. The other router continues both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tandem_client.resuming import Answer
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import OutputFormat
from tests.support.deployment import Answer as Received
from tests.support.deployment import Deployment, another_router, deploy, make_request, tiny_config
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "random:smollm2-tiny"  # a token is a byte, so most characters of the outputs below have several
TOKENIZER = load_tokenizer(MODEL)
NUM_OUTPUT = 28
SAMPLED: dict[str, Any] = {
    "temperature": 1.0, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}  # fmt: skip
SNOWMEN = OutputFormat(regex="(☃|é|😀|ab){5,12}")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED | {"logprobs": 2},
    "a seed that the router draws": {"temperature": 1.0, "ignore_eos": False, "max_tokens": 12},
    "whole characters": SAMPLED | {"output_format": SNOWMEN, "ignore_eos": False},
    "a stop string": SAMPLED | {"output_format": SNOWMEN, "ignore_eos": False, "stop_strings": ["b☃", "☃😀", "☃éa"]},
    "a stop string late": SAMPLED
    | {"output_format": SNOWMEN, "ignore_eos": False, "stop_strings": ["☃", "é", "😀"], "min_tokens": 9},
}


@dataclass
class TwoRouters:
    first: Deployment
    second: Deployment

    async def resume(self, request: inference_pb2.GenerateRequest, whole: Received, index: int, salt: str) -> Received:
        """Continue behind the first `index` tokens of `whole`, at the other router."""
        answer = Answer(request)
        assert whole.started is not None
        answer.take(inference_pb2.GenerateResponse(started=whole.started))
        chunk = inference_pb2.TokenChunk(token_ids=whole.token_ids[:index])
        answer.take(inference_pb2.GenerateResponse(tokens=chunk))
        following = answer.next_request()
        following.cache_salt = salt and f"{salt} {index}"
        (rest,) = await self.second.generate_all(following)
        return rest


def logprobs_of(answer: Received) -> list[float]:
    return [entry.logprob for chunk in answer.chunks for entry in chunk.logprobs]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "never"])
async def routers(request: pytest.FixtureRequest) -> AsyncIterator[TwoRouters]:
    """`params`: prompts are computed by the decode worker, or by a prefill worker."""
    config = tiny_config(MODEL, local_prefill=request.param)
    async with deploy(config, num_prefill=int(request.param == "never")) as first, another_router(first) as second:
        yield TwoRouters(first, second)


@pytest.mark.parametrize("case", CASES)
async def test_resumed_at_every_index_the_answer_is_the_undisturbed_one(routers: TwoRouters, case: str) -> None:
    options = CASES[case]
    defaults: dict[str, Any] = {"text": "the start of a story", "max_tokens": NUM_OUTPUT}
    request = make_request(**(defaults | options))
    if "seed" not in options:
        request.sampling.ClearField("seed")
    (whole,) = await routers.first.generate_all(request)
    assert whole.indices == list(range(len(whole.token_ids)))
    if "stop_strings" in options:
        assert whole.finished.stop_match in options["stop_strings"], "no stop string matched: nothing was tested"
    # With another salt, no worker has the KV, so a prefill worker computes the start of the answer.
    salt = case if routers.first.prefill else ""
    resumed = await asyncio.gather(
        *(routers.resume(request, whole, index, salt) for index in range(1, len(whole.token_ids) + 1))
    )
    for index, rest in enumerate(resumed, start=1):
        first = TextStream(TOKENIZER.detokenizer(), StopStrings(request.stop.stop_strings), request.stop.min_tokens)
        text, _ = first.push(whole.token_ids[:index])
        assert text + rest.text == whole.text, index
        assert whole.token_ids[:index] + rest.token_ids == whole.token_ids
        assert rest.indices == list(range(index, len(whole.token_ids)))
        assert logprobs_of(rest) == pytest.approx(logprobs_of(whole)[index:], abs=1e-4)
        ends = [
            (end.finish_reason, end.stop_match, end.seed, end.usage.prompt_tokens, end.usage.completion_tokens)
            for end in (rest.finished, whole.finished)
        ]
        assert ends[0] == ends[1]
        assert rest.finished.attempts == (1 if rest.token_ids else 0)
        assert rest.started == (whole.started if rest.token_ids else None)
    if routers.first.prefill:
        paths = {rest.finished.path for rest in resumed}
        assert inference_pb2.REQUEST_PATH_DISAGGREGATED in paths, "the decode worker computed every start"
