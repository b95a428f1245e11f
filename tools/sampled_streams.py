"""The default model's sampled tokens on every path that a request can take: `python -m tools.sampled_streams`.

In float32 every stream is that of the request alone. In bfloat16 rounding differs between paths, and a stream changes
where two tokens lie within it: not many more streams change than of the same requests decoded greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Line, Report
from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence as EngineSequence
from engine.factory import build_runner
from engine.runner import Runner, run_step
from model_files.catalogue import fetch
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, tiny_config
from text.tokenizer import load_tokenizer

MODEL = "smollm2-135m"
NUM_OUTPUT = 24
MOST_BESIDE_GREEDY = 1.5  # streams that differ in bfloat16, beside greedy ones
TIMEOUT_S = 3600.0
FILTERS: list[dict[str, float]] = [{}, {"top_p": 0.95}, {"top_k": 50}]
LICENSE = Path(__file__).parents[1] / "LICENSE"
Streams = dict[str, list[int]]  # output tokens, by request id


def streams(
    runner: Runner, requests: Sequence[Request], budget: int = 512, max_running: int = 32, num_blocks: int = 0
) -> tuple[Streams, int]:
    """The tokens, and the number of preemptions. `num_blocks`: of the pool; 0 = all that the runner has."""
    config = SchedulerConfig(budget, max_running, len(requests), slo_itl_ms=60_000.0)
    scheduler = Scheduler(config, BlockPool(num_blocks or runner.num_blocks), runner.layout.block_size, frozenset())
    tokens: Streams = {}
    for arrival, request in enumerate(requests):
        scheduler.add(EngineSequence(request, arrival))
        tokens[request.request_id] = list(request.token_ids[request.num_prompt_tokens :])
    while (plan := scheduler.schedule()) is not None:
        for event in scheduler.complete_step(run_step(runner, plan)):
            assert event.index == len(tokens[event.sequence_id])
            tokens[event.sequence_id].append(event.token.token_id)
    return tokens, scheduler.num_preemptions


def alone(runner: Runner, requests: Sequence[Request]) -> Streams:
    """Each request in an empty engine that computes no guessed tokens: the reference."""
    found: Streams = {}
    for request in requests:
        undisturbed = replace(request, sampling=replace(request.sampling, speculation=False))
        found |= streams(runner, [undisturbed])[0]
    return found


def preempted(runner: Runner, requests: Sequence[Request], num_blocks: int) -> Streams:
    """The requests in a pool too small for those that run."""
    found, num_preemptions = streams(runner, requests, max_running=16, num_blocks=num_blocks)
    assert num_preemptions, "nothing was preempted"
    return found


def resumed(runner: Runner, requests: Sequence[Request], expected: Mapping[str, list[int]]) -> Streams:
    """Each request begins anew behind the tokens that it has delivered: one, two and so on up to all but one."""
    again = []
    for number, request in enumerate(requests):
        delivered = expected[request.request_id][: 1 + number % (request.sampling.max_tokens - 1)]
        again.append(replace(request, token_ids=(*request.token_ids, *delivered)))
    return streams(runner, again)[0]


def engine_paths(num_blocks: int) -> dict[str, Callable[[Runner, Sequence[Request]], Streams]]:
    """Every way through one engine, apart from `alone` and `resumed`. `num_blocks`: of a pool that is too small."""
    return {
        "batches of 32": lambda runner, requests: streams(runner, requests)[0],
        "batches of 8": lambda runner, requests: streams(runner, requests, max_running=8)[0],
        "chunks of 16 tokens": lambda runner, requests: streams(runner, requests, budget=16, max_running=8)[0],
        "preempted": lambda runner, requests: preempted(runner, requests, num_blocks),
    }


def make_requests(count: int, *, greedy: bool = False) -> list[Request]:
    """Prompts of 20 to 120 tokens, of text and of random tokens in turns; temperatures 0.5 to 1.2."""
    fetch(MODEL)
    tokenizer, chance = load_tokenizer(MODEL), random.Random(21)
    text = tokenizer.encode(LICENSE.read_text(encoding="utf-8"), add_special=False)
    found = []
    for number in range(count):
        length = chance.randrange(20, 121)
        start = chance.randrange(len(text) - length)
        noise = [chance.randrange(tokenizer.info.vocab_size) for _ in range(length)]
        temperature, seed = chance.uniform(0.5, 1.2), chance.randrange(2**60)
        sampling = SamplingParams(
            max_tokens=NUM_OUTPUT,
            ignore_eos=True,
            temperature=0.0 if greedy else temperature,
            seed=seed,
            **FILTERS[number % len(FILTERS)],  # type: ignore[arg-type]
        )
        prompt = tuple(noise if number % 2 else text[start : start + length])
        found.append(Request(str(number), prompt, length, sampling))
    return found


async def split(dtype: str, requests: Sequence[Request]) -> Streams:
    """The requests at once, through a prefill worker and a decode worker that reads their KV chunk by chunk."""
    config = tiny_config(MODEL, transport="nixl")
    config = replace(config, engine=replace(config.engine, dtype=dtype, kv_memory_mb=128))
    slots = asyncio.Semaphore(config.scheduler.max_running)

    async def tokens_of(deployment: Deployment, request: Request) -> list[int]:
        sampling = request.sampling
        async with slots:
            answer = await deployment.generate(
                TIMEOUT_S,
                token_ids=request.token_ids,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        return answer.token_ids

    async with deploy(config) as deployment:
        found = await asyncio.gather(*(tokens_of(deployment, request) for request in requests))
    return {request.request_id: tokens for request, tokens in zip(requests, found, strict=True)}


def count_different(dtype: str, requests: Sequence[Request], num_blocks: int = 40) -> Iterator[tuple[str, int]]:
    """The number of streams that differ from the request alone, path by path. `num_blocks`: of a pool that is too small
    for all that run: 40 preempt 14 times in 300 requests."""
    runner = build_runner(EngineConfig(model=MODEL, dtype=dtype, kv_memory_mb=256, num_threads=1))
    expected = alone(runner, requests)
    assert len({tuple(tokens) for tokens in expected.values()}) > 0.9 * len(requests), "one stream like the other"

    def different(found: Streams) -> int:
        return sum(found[name] != tokens for name, tokens in expected.items())

    yield "resumed", different(resumed(runner, requests, expected))
    paths = engine_paths(num_blocks)
    if len(requests) <= 8:
        del paths["batches of 8"]  # they are the batches of 32
    for name, path in paths.items():
        yield name, different(path(runner, requests))
    runner.close()
    yield "split", different(asyncio.run(split(dtype, requests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    count = parser.parse_args().streams
    report, totals = Report("sampled_streams"), []
    report.say(f"{count} streams of {NUM_OUTPUT} tokens; those that differ from the request alone")
    for dtype, greedy in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        totals.append(0)
        for path, num_different in count_different(dtype, make_requests(count, greedy=greedy)):
            totals[-1] += num_different
            report.add(Line(f"{dtype}, {'greedy' if greedy else 'sampled'}: {path}", num_different, "streams"))
    in_float32, sampled, greedily = totals
    report.add(Line("float32, sampled: all paths", in_float32, "streams", most=0))
    report.add(Line("bfloat16: sampled beside greedy", sampled / max(greedily, 1), "times", most=MOST_BESIDE_GREEDY))
    report.write()


if __name__ == "__main__":
    main()
