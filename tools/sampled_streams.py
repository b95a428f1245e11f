"""The default model's sampled tokens on every path that a request can take: `python -m tools.sampled_streams`.

In float32 every stream is that of the request alone. In bfloat16 rounding differs between paths, and a stream changes
where two tokens lie within it: not many more streams change than of the same requests decoded greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Line, Report
from core.config import EngineConfig
from core.request import Request, SamplingParams
from engine.factory import build_runner
from model_files.catalogue import fetch
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.sampled_streams import Streams, alone, engine_paths, resumed
from text.tokenizer import load_tokenizer

MODEL = "smollm2-135m"
NUM_OUTPUT = 24
MOST_BESIDE_GREEDY = 1.5  # streams that differ in bfloat16, beside greedy ones
TIMEOUT_S = 3600.0
FILTERS: list[dict[str, float]] = [{}, {"top_p": 0.95}, {"top_k": 50}]
LICENSE = Path(__file__).parents[1] / "LICENSE"


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
