"""Sampled tokens do not tell which path a request took, with a model of flat distributions.

tests/integration/test_sampled_streams.py compares the tokens of the default model.
"""

from __future__ import annotations

import random

import pytest

from core.config import EngineConfig
from core.request import Request, SamplingParams
from engine.factory import build_runner
from engine.runner import Runner
from tests.support.sampled_streams import Streams, alone, engine_paths, resumed

NUM_REQUESTS = 24
OPTIONS: list[dict[str, float]] = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}]
PATHS = engine_paths(num_blocks=10)


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


@pytest.fixture(scope="module")
def expected(runner: Runner, requests: list[Request]) -> Streams:
    return alone(runner, requests)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_draws_what_a_request_alone_draws(
    runner: Runner, requests: list[Request], expected: Streams, path: str
) -> None:
    assert PATHS[path](runner, requests) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == NUM_REQUESTS


def test_a_resumed_request_draws_what_it_draws_alone(
    runner: Runner, requests: list[Request], expected: Streams
) -> None:
    assert resumed(runner, requests, expected) == expected
