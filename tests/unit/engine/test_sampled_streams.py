"""Sampled tokens do not tell which path a request took: alone, in a batch, in chunks, preempted and computed again."""

from __future__ import annotations

import random

import pytest

from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from engine.factory import build_runner
from engine.runner import Runner, run_step

NUM_REQUESTS = 24
OPTIONS: list[dict[str, float]] = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return build_runner(EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=16, num_threads=1))


@pytest.fixture(scope="module")
def requests(runner: Runner) -> list[Request]:
    """A random model has flat distributions."""
    chance = random.Random(1)
    found = []
    for number in range(NUM_REQUESTS):
        prompt = tuple(chance.randrange(runner.info.vocab_size) for _ in range(chance.randrange(8, 40)))
        temperature = chance.choice((0.5, 0.8, 1.2))
        options = {**OPTIONS[number % len(OPTIONS)], "temperature": temperature, "seed": chance.randrange(2**60)}
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, **options)  # type: ignore[arg-type]
        found.append(Request(str(number), prompt, len(prompt), sampling))
    return found


def streams(
    runner: Runner, requests: list[Request], budget: int = 512, max_running: int = 32, num_blocks: int = 1024
) -> tuple[dict[str, list[int]], int]:
    """The tokens by request, and the number of preemptions."""
    config = SchedulerConfig(budget, max_running, NUM_REQUESTS, slo_itl_ms=60_000.0)
    scheduler = Scheduler(config, BlockPool(num_blocks), runner.layout.block_size, frozenset())
    tokens: dict[str, list[int]] = {}
    for arrival, request in enumerate(requests):
        scheduler.add(Sequence(request, arrival))
        tokens[request.request_id] = []
    while (plan := scheduler.schedule()) is not None:
        for event in scheduler.complete_step(run_step(runner, plan)):
            tokens[event.sequence_id].append(event.token.token_id)
    return tokens, scheduler.num_preemptions


@pytest.fixture(scope="module")
def alone(runner: Runner, requests: list[Request]) -> dict[str, list[int]]:
    return {name: tokens for request in requests for name, tokens in streams(runner, [request])[0].items()}


@pytest.mark.parametrize(("budget", "max_running"), [(512, 32), (512, 5), (16, 8)])
def test_a_batch_and_chunks_draw_what_a_request_alone_draws(
    runner: Runner, requests: list[Request], alone: dict[str, list[int]], budget: int, max_running: int
) -> None:
    assert streams(runner, requests, budget, max_running)[0] == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == NUM_REQUESTS


def test_a_preempted_request_draws_what_it_draws_alone(
    runner: Runner, requests: list[Request], alone: dict[str, list[int]]
) -> None:
    tokens, num_preemptions = streams(runner, requests, max_running=16, num_blocks=10)
    assert num_preemptions
    assert tokens == alone
