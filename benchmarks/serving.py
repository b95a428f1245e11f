"""Latency and throughput of a fleet on this machine: `make bench`.

Closed loop: for each level of concurrency, that many clients ask one question after another over the public gRPC API.
The prompts share no prefix, so nothing comes from a cache. Words as in the glossary: TTFT from the client's send to
its first non-empty token, TPOT = (last - first) / (n - 1).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass

from benchmarks.report import Line, Report, load
from cli.serve import fleet, fleet_spec
from core.config import ClusterConfig, EngineConfig, RouterConfig, TandemConfig
from fleet import cluster as ray_cluster
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

TIMEOUT_S = 300.0
FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, in seconds."""

    ttft_s: float
    tpot_s: float
    num_tokens: int


async def ask(client: AsyncClient, rng: random.Random, prompt_tokens: int, output_tokens: int) -> Sample:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(rng.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(prompt_tokens))
    request.sampling.temperature = 0.0
    request.stop.max_tokens = output_tokens
    request.stop.ignore_eos = True
    start = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    async for response in client.generate(request, TIMEOUT_S):
        if response.HasField("tokens"):
            last = time.perf_counter()
            first = first or last
            num_tokens += len(response.tokens.token_ids)
    return Sample(first - start, (last - first) / max(1, num_tokens - 1), num_tokens)


async def level(client: AsyncClient, concurrency: int, arguments: argparse.Namespace, report: Report) -> None:
    """The lines for one number of clients."""

    async def one_client(seed: int) -> list[Sample]:
        rng = random.Random(seed)
        count = arguments.requests
        return [await ask(client, rng, arguments.prompt_tokens, arguments.output_tokens) for _ in range(count)]

    start = time.perf_counter()
    per_client = await asyncio.gather(*(one_client(concurrency * 1000 + index) for index in range(concurrency)))
    seconds = time.perf_counter() - start
    samples = [sample for samples in per_client for sample in samples]
    clients = f"{concurrency} client{'s' if concurrency > 1 else ''}"
    for word, times_s in (("TTFT", [one.ttft_s for one in samples]), ("TPOT", [one.tpot_s for one in samples])):
        report.add(Line(f"{clients}: {word}, median", "", statistics.median(times_s) * 1e3, "ms"))
        report.add(Line(f"{clients}: {word}, worst", "", max(times_s) * 1e3, "ms"))
    tokens_per_s = sum(sample.num_tokens for sample in samples) / seconds
    report.add(Line(f"{clients}: tokens of all together", "", tokens_per_s, "tokens/s"))


async def run(cluster: ray_cluster.Cluster, config: TandemConfig, arguments: argparse.Namespace) -> None:
    async with fleet(cluster, fleet_spec(config), print) as router, AsyncClient(router.address) as client:
        await ask(client, random.Random(0), arguments.prompt_tokens, 4)  # the first one also connects the workers
        report = Report("serving")
        report.say(
            f"{config.engine.model}, {arguments.prompt_tokens} prompt and {arguments.output_tokens} output tokens, "
            f"{arguments.prefill} prefill and {arguments.decode} decode workers; {load()}"
        )
        for concurrency in arguments.concurrency:
            await level(client, concurrency, arguments, report)
        report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=4, help="of each client, one after another")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    config = TandemConfig(
        engine=EngineConfig(model=arguments.model),
        router=RouterConfig(port=0),
        cluster=ClusterConfig(num_prefill=arguments.prefill, num_decode=arguments.decode),
    )
    cluster = ray_cluster.connect(config.cluster)
    try:
        asyncio.run(run(cluster, config, arguments))
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
