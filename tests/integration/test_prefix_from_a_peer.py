"""A worker reads a prefix from the cache of a peer, over real gRPC and nixl: the tokens are those of one engine that
nothing disturbs, greedy and sampled, and also when the source has evicted the prefix or never answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from core.request import Request, SamplingParams
from router.requests import open_dispatches
from router.routing import policy
from tests.support.deployment import Answer, Deployment, deploy, machine_of, tiny_config
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until

PROMPT = tuple(range(3, 100))
NUM_OUTPUT = 40
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.875, "seed": 7}]


@pytest_asyncio.fixture(params=["fake:tiny", "random:llama-tiny"])
async def deployment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """A tiny model computes a prefix faster than any call takes, so here the router reads wherever it can."""
    monkeypatch.setattr(policy, "LEAST_GAIN_S", -1e6)
    monkeypatch.setattr(open_dispatches, "LATE_S", 30.0)  # a busy machine delays messages
    async with deploy(tiny_config(request.param, transport="nixl", peer_prefixes="auto")) as running:
        yield running


def expected(deployment: Deployment, prompt: tuple[int, ...], **sampling: Any) -> list[int]:
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True, **({"temperature": 0.0} | sampling))
    return CoLocatedEngine(deployment.config.engine).generate(Request("reference", prompt, len(prompt), params))


async def second_turn(deployment: Deployment, **sampling: Any) -> tuple[tuple[int, ...], Answer]:
    """The decode worker has the KV of the first answer, and the prefill worker has not."""
    first = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT)
    await deployment.settle()
    history = (*PROMPT, *first.token_ids, 5, 6, 7)
    return history, await deployment.generate(token_ids=history, max_tokens=NUM_OUTPUT, **sampling)


def read_tokens(answer: Answer) -> int:
    assert answer.finished is not None
    return answer.finished.receipt.read_tokens


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
async def test_turn_two_reads_the_history_from_the_decode_worker(
    deployment: Deployment, sampling: dict[str, Any]
) -> None:
    history, answer = await second_turn(deployment, **sampling)
    assert answer.token_ids == expected(deployment, history, **sampling)
    block_size = machine_of(deployment.prefill[0]).core.scheduler.block_size
    assert read_tokens(answer) >= block_size
    assert answer.finished is not None
    assert answer.finished.usage.cached_tokens >= len(PROMPT) // block_size * block_size + read_tokens(answer)
    await deployment.settle()


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
async def test_a_source_that_has_evicted_its_prefix_costs_its_time_only(
    deployment: Deployment, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = machine_of(deployment.decode[0]).core.pool
    monkeypatch.setattr(pool, "match_prefix", lambda *_: [])
    history, answer = await second_turn(deployment, **sampling)
    assert answer.token_ids == expected(deployment, history, **sampling)
    assert read_tokens(answer) == 0
    await deployment.settle()


async def test_a_salted_history_is_read_under_its_salt_alone(deployment: Deployment) -> None:
    first = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT, cache_salt="a")
    await deployment.settle()
    history = (*PROMPT, *first.token_ids, 5, 6, 7)
    other = await deployment.generate(token_ids=history, max_tokens=4, cache_salt="b")
    same = await deployment.generate(token_ids=history, max_tokens=4, cache_salt="a")
    assert (read_tokens(other), read_tokens(same) > 0) == (0, True)
    assert other.token_ids == same.token_ids == expected(deployment, history)[:4]


async def test_a_source_that_never_answers_costs_its_time_only(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of the reader, and makes no offer: no READY comes."""
    asked: list[object] = []

    def ignore(event: object, *_: object) -> list[object]:
        asked.append(event)
        return []

    monkeypatch.setattr(open_dispatches, "LATE_S", 0.05)
    monkeypatch.setattr(machine_of(deployment.decode[0]).prefixes, "offer", ignore)
    history, answer = await second_turn(deployment)
    await until(lambda: bool(asked), "the source was asked")
    assert answer.token_ids == expected(deployment, history)
    assert read_tokens(answer) == 0
    await deployment.settle()
