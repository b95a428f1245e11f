"""Guessed tokens change no token, on any way of a request. The guesses here are right, wrong, and right for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from core.request import Request, SamplingParams
from router.serving.output_formats import format_grammar
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import OutputFormat
from tests.support.deployment import Answer, Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.drafts import Oracle, compute_every_guess
from tests.support.reference import CoLocatedEngine
from tests.support.steps import slow_down

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_OUTPUT = 60
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.75, "top_p": 0.875, "top_k": 40, "seed": 11},
    "penalties": {"temperature": 0.75, "seed": 12, "repetition_penalty": 1.25, "presence_penalty": 0.5},
    "bias": {"temperature": 0.5, "seed": 13, "logit_bias": {7: 2.0, 9: -1.0}},
}
ITEMS = OutputFormat(regex=r'(\{"name": "[a-z]{3,9}", "colour": "(red|green)"\}, ){6}')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle() -> AsyncIterator[Oracle]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield compute_every_guess(monkeypatch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: str, oracle: Oracle) -> AsyncIterator[Deployment]:  # noqa: ARG001
    async with deploy(tiny_config(model, transport="nixl"), num_decode=2) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(running: Deployment) -> AsyncIterator[Deployment]:
    yield running
    await running.settle()
    running.drop_caches(running.workers)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed * 10_007 + length)
    return tuple(generator.randrange(1, 250) for _ in range(length))


def read(
    oracle: Oracle, engine: CoLocatedEngine, prompt: tuple[int, ...], form: OutputFormat | None = None, **sampling: Any
) -> list[int]:
    """The tokens of one engine that computes no guesses. From now on the oracle knows them."""
    params = SamplingParams(
        **{"max_tokens": NUM_OUTPUT, "ignore_eos": form is None, "speculation": False, **sampling},
        grammar=format_grammar(form) if form is not None else "",
    )
    tokens = engine.generate(Request("reference", prompt, len(prompt), params))
    oracle.texts.append([*prompt, *tokens])
    return tokens


def check_drafts(answer: Answer, *, num_right: int = 1) -> None:
    assert answer.finished is not None
    usage = answer.finished.usage
    assert num_right <= usage.accepted_drafts < usage.drafted_tokens, "no guess was right, or none was wrong"


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_two_pools_give_the_tokens_of_one_engine(
    deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine, name: str
) -> None:
    """The prompts need three chunks, and one of them is computed already."""
    prompts = [prompt_of(150, seed) for seed in (1, 2, 3)] + [prompt_of(150, 1)[:100]]
    expected = [read(oracle, engine, prompt, **SAMPLINGS[name]) for prompt in prompts]
    calls = (deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLINGS[name]) for prompt in prompts)
    answers = await asyncio.gather(*calls)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.token_ids == tokens
        assert answer.indices == list(range(NUM_OUTPUT))
        check_drafts(answer, num_right=NUM_OUTPUT // 2)


async def test_a_request_may_refuse_guesses(deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine) -> None:
    prompt = prompt_of(50, 4)
    tokens = read(oracle, engine, prompt, temperature=0.0)
    answer = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, speculation=False)
    assert answer.token_ids == tokens
    assert answer.finished is not None
    assert answer.finished.usage.drafted_tokens == answer.finished.usage.accepted_drafts == 0


async def test_an_output_ends_inside_a_run_of_guesses(
    deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine
) -> None:
    prompt = prompt_of(50, 5)
    tokens = read(oracle, engine, prompt, temperature=0.0)
    for last in range(20, 30):
        short = await deployment.generate(token_ids=prompt, max_tokens=last)
        assert short.token_ids == tokens[:last]
        first = tokens.index(tokens[last])
        stopped = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, stop_token_ids=[tokens[last]])
        assert stopped.token_ids == tokens[: first + 1]
        assert stopped.finished is not None
        assert stopped.finished.finish_reason == inference_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLINGS["penalties"]], ids=["greedy", "sampled"])
async def test_guesses_break_no_format(
    deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine, sampling: dict[str, Any]
) -> None:
    prompt = prompt_of(40, 6)
    expected = read(oracle, engine, prompt, ITEMS, **sampling)
    request = make_request(
        token_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=False, output_format=ITEMS, **sampling
    )  # fmt: skip
    (answer,) = await deployment.generate_all(request)
    assert answer.token_ids == expected
    check_drafts(answer)


@pytest.mark.parametrize("name", ["greedy", "penalties"])
async def test_the_tokens_are_the_same_while_sequences_are_preempted(
    model: str, oracle: Oracle, engine: CoLocatedEngine, name: str
) -> None:
    prompts = [prompt_of(60, seed) for seed in range(20, 26)]
    expected = [read(oracle, engine, prompt, **SAMPLINGS[name]) for prompt in prompts]
    async with deploy(tiny_config(model, local_prefill="auto"), num_prefill=0) as deployment:
        (worker,) = deployment.decode
        pool = machine_of(worker).core.pool
        kept = pool.allocate(pool.num_blocks - 20)  # two sequences and a half
        assert kept is not None
        calls = (deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLINGS[name]) for prompt in prompts)
        answers = await asyncio.gather(*calls)
        assert [answer.token_ids for answer in answers] == expected
        assert machine_of(worker).core.scheduler.num_preemptions > 0, "nothing happened"
        check_drafts(answers[0])
        pool.release(kept)
        await deployment.settle()


@pytest.mark.parametrize("num_delivered", [1, 2, 15, 31, 32, 33, 45])
async def test_a_stream_whose_worker_dies_goes_on_with_guesses(
    model: str, oracle: Oracle, engine: CoLocatedEngine, num_delivered: int
) -> None:
    prompt = prompt_of(80, 7)
    tokens = read(oracle, engine, prompt, **SAMPLINGS["penalties"])
    config = tiny_config(model, report_stale_s=1.0, worker_lost_s=1.5)
    config = replace(config, transfer=replace(config.transfer, transport="memory", lease_s=2.0))
    async with deploy(config, num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.05)
        request = make_request(token_ids=prompt, max_tokens=NUM_OUTPUT, **SAMPLINGS["penalties"])
        answer = Answer()
        async for response in deployment.inference.Generate(request, timeout=60):
            if response.HasField("finished"):
                answer.finished = response.finished
                continue
            answer.token_ids += response.tokens.token_ids
            if num_delivered and len(answer.token_ids) >= num_delivered:
                num_delivered = 0
                (busy,) = [worker for worker in deployment.decode if worker._view.load.num_calls]
                await busy.stop()
        assert answer.token_ids == tokens
        assert answer.finished is not None
        assert answer.finished.attempts == 2
        check_drafts(answer, num_right=0)
