"""Whatever path a request takes, its tokens are those of one engine that nothing disturbs.

Each way of drawing, also inside an output format, on each path: two pools with a chunked prompt, a prefix hit, local
prefill, preemption, and the death of the decode worker. All steps compute guesses, and the reference computes none: the
guesses are right, wrong, and right for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from router.serving.output_formats import format_grammar
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import OutputFormat
from tests.support.deployment import Answer, Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.drafts import Oracle, compute_every_guess
from tests.support.reference import CoLocatedEngine, random_prompt
from tests.support.steps import slow_down
from tests.support.waiting import until
from worker.service import WorkerService

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_OUTPUT = 60
LONG_S = 60.0
ITEMS = OutputFormat(regex=r'(\{"name": "[a-z]{3,9}", "colour": "(red|green)"\}, ){6}')
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.75, "top_p": 0.875, "top_k": 40, "seed": 11},
    "penalties": {"temperature": 0.75, "seed": 12, "repetition_penalty": 1.25, "presence_penalty": 0.5},
    "min tokens": {"temperature": 1.0, "seed": 14, "logit_bias": {2: 4.0}, "stop_token_ids": [2], "min_tokens": 33},
    "format": {"temperature": 0.0, "output_format": ITEMS},
    "format, sampled": {"temperature": 1.0, "seed": 15, "presence_penalty": 0.5, "output_format": ITEMS},
}
every_draw = pytest.mark.parametrize("draw", DRAWS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle() -> AsyncIterator[Oracle]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield compute_every_guess(monkeypatch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: str, oracle: Oracle) -> AsyncIterator[Deployment]:  # noqa: ARG001
    """Nothing is late. In a process that stops for seconds, a usual limit passes, and a prompt is computed again."""
    config = tiny_config(model, transport="nixl", report_stale_s=LONG_S, worker_lost_s=LONG_S)
    config = replace(config, transfer=replace(config.transfer, connect_timeout_s=LONG_S, read_grace_s=LONG_S))
    async with deploy(config, num_decode=2) as deployment:
        yield deployment


def read(oracle: Oracle, engine: CoLocatedEngine, prompt: tuple[int, ...], draw: str) -> list[int]:
    """The tokens of one engine that computes no guesses. From now on the oracle knows them."""
    given = dict(DRAWS[draw])
    form = given.pop("output_format", None)
    given["stop_token_ids"] = frozenset(given.pop("stop_token_ids", ()))
    grammar = format_grammar(form) if form is not None else ""
    tokens = engine.tokens(prompt, NUM_OUTPUT, ignore_eos=form is None, speculation=False, grammar=grammar, **given)
    oracle.texts.append([*prompt, *tokens])
    return tokens


def ask(prompt: tuple[int, ...], draw: str, **fields: Any) -> inference_pb2.GenerateRequest:
    given = {"max_tokens": NUM_OUTPUT, "ignore_eos": "output_format" not in DRAWS[draw], **DRAWS[draw], **fields}
    return make_request(token_ids=prompt, **given)


async def answer_all(deployment: Deployment, prompts: list[tuple[int, ...]], draw: str) -> list[Answer]:
    answers = await asyncio.gather(*(deployment.generate_all(ask(prompt, draw)) for prompt in prompts))
    return [answer for (answer,) in answers]


def busy_of(deployment: Deployment) -> list[WorkerService]:
    return [worker for worker in deployment.decode if worker._view.load.num_calls]


def check_drafts(answer: Answer, *, num_right: int = 1) -> None:
    usage = answer.finished.usage
    assert num_right <= usage.accepted_drafts < usage.drafted_tokens, "no guess was right, or none was wrong"


@every_draw
async def test_two_pools_chunks_and_a_prefix_hit(
    deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine, draw: str
) -> None:
    """The prompts need three chunks, and one of them is computed already."""
    prompts = [random_prompt(150, seed) for seed in (1, 2, 3)] + [random_prompt(150, 1)[:100]]
    expected = [read(oracle, engine, prompt, draw) for prompt in prompts]
    for answer, tokens in zip(await answer_all(deployment, prompts, draw), expected, strict=True):
        assert answer.token_ids == tokens
        assert answer.indices == list(range(len(tokens)))
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        check_drafts(answer, num_right=len(tokens) // 3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(model: str, oracle: Oracle) -> AsyncIterator[Deployment]:  # noqa: ARG001
    """A decode worker alone. Two sequences start in its pool, and only one can end."""
    async with deploy(tiny_config(model, local_prefill="auto"), num_prefill=0) as deployment:
        (worker,) = deployment.decode
        slow_down(worker, 0.02)  # so that they run together
        pool = machine_of(worker).core.pool
        kept = pool.allocate(pool.num_blocks - 10)
        assert kept is not None
        yield deployment
        pool.release(kept)
        await deployment.settle()


@every_draw
async def test_local_prefill_while_sequences_are_preempted(
    small: Deployment, oracle: Oracle, engine: CoLocatedEngine, draw: str
) -> None:
    first = 20 + 4 * list(DRAWS).index(draw)  # no prompt is in the prefix cache
    prompts = [random_prompt(60, seed) for seed in range(first, first + 4)]
    expected = [read(oracle, engine, prompt, draw) for prompt in prompts]
    scheduler = machine_of(small.decode[0]).core.scheduler
    num_before = scheduler.num_preemptions
    answers = await answer_all(small, prompts, draw)
    assert [answer.token_ids for answer in answers] == expected
    assert scheduler.num_preemptions > num_before, "nothing happened"
    assert all(answer.finished.path == inference_pb2.REQUEST_PATH_LOCAL for answer in answers)
    check_drafts(answers[0])


@pytest.mark.parametrize(
    ("draw", "num_delivered"), [("penalties", 1), ("penalties", 32), ("format, sampled", 17), ("min tokens", 8)]
)
async def test_a_stream_whose_worker_dies(
    model: str, oracle: Oracle, engine: CoLocatedEngine, draw: str, num_delivered: int
) -> None:
    """The other worker reads the prompt and the delivered tokens anew, and with them where the format stands. When
    the test stops the first worker, the other one has at least three steps to compute, each of up to seven tokens."""
    prompt = random_prompt(80, 7)
    tokens = read(oracle, engine, prompt, draw)
    config = tiny_config(model, report_stale_s=2.0, worker_lost_s=3.0)
    config = replace(config, transfer=replace(config.transfer, transport="memory", lease_s=4.0))
    async with deploy(config, num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.1)
        answer = Answer()
        async for response in deployment.inference.Generate(ask(prompt, draw, logprobs=2), timeout=60):
            answer.take(response)
            assert len(response.tokens.logprobs) == len(response.tokens.token_ids)
            if num_delivered and len(answer.token_ids) >= num_delivered:
                num_delivered = 0
                # the first token may overtake the call of the decode worker
                await until(lambda: busy_of(deployment), "a decode worker has the call")
                (busy,) = busy_of(deployment)
                await busy.stop()
        assert answer.token_ids == tokens
        assert answer.finished.attempts == 2
        assert answer.finished.path == inference_pb2.REQUEST_PATH_RECOMPUTED
        assert answer.finished.usage.drafted_tokens > 0  # of the second attempt, where all may be right


async def test_an_output_ends_inside_a_run_of_guesses(
    deployment: Deployment, oracle: Oracle, engine: CoLocatedEngine
) -> None:
    prompt = random_prompt(50, 5)
    tokens = read(oracle, engine, prompt, "greedy")
    whole = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT)
    for last in range(20, 30):
        short = await deployment.generate(token_ids=prompt, max_tokens=last)
        assert short.token_ids == tokens[:last]
        first = tokens.index(tokens[last])
        stopped = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, stop_token_ids=[tokens[last]])
        assert stopped.token_ids == tokens[: first + 1]
        assert stopped.finished.finish_reason == inference_pb2.FINISH_REASON_STOP
    stop = whole.text[40:44]
    at_string = await deployment.generate(token_ids=prompt, max_tokens=NUM_OUTPUT, stop_strings=[stop])
    assert at_string.text == whole.text[: whole.text.index(stop)]
    assert at_string.finished.stop_match == stop
