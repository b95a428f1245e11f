"""`tandem serve` on one GPU: requests that arrive at a steady rate, at two pools and at one undivided worker.

Both fleets have the whole GPU. The two pools share it, each with weights of its own, so their steps take turns on its
processors; on two GPUs they would not. The section shows that the whole path runs, and what it adds to the engine's
own figures. TTFT runs from a client's send to the first token; a gap is the time between two tokens of one stream.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time

from benchmarks.asking import Answer, ask
from benchmarks.gpu_sections.driver import BIG_MODEL, TINY_MODEL, random_prompt
from benchmarks.gpu_sections.section import Section
from benchmarks.processes import tandem
from benchmarks.report import Line
from cli.credentials import client_of, find_credentials
from cli.screens.path_lines import paths_of

PORT = 50661
ADDRESS = f"127.0.0.1:{PORT}"
TIMEOUT_S = 120.0
PROMPT, OUTPUT, RATE, REQUESTS = 2048, 128, 8.0, 160  # tokens, tokens, requests per second
TINY_PROMPT, TINY_OUTPUT, TINY_RATE, TINY_REQUESTS = 40, 8, 20.0, 10
FLEET_S = 75.0
FLEETS = {
    "two pools": "prefill_gpus = 0.45\ndecode_gpus = 0.45\n",
    "one worker": "num_prefill = 0\ndecode_gpus = 0.9\n",
}
TINY_FLEETS = {"two pools": "", "one worker": "num_prefill = 0\n"}


def run(section: Section) -> None:
    if importlib.util.find_spec("ray") is None:
        section.note("not measured, ray is not installed")
        return
    for name, pools in (TINY_FLEETS if section.rehearse else FLEETS).items():
        if section.has_time_for(FLEET_S, name):
            with section.case(name):
                measure_fleet(section, name, pools)


def measure_fleet(section: Section, name: str, pools: str) -> None:
    model, device = (TINY_MODEL, "cpu") if section.rehearse else (BIG_MODEL, "cuda")
    engine = f'[engine]\nmodel = "{model}"\ndevice = "{device}"\n'
    start = time.perf_counter()
    with tandem(PORT, config=f"{engine}[cluster]\n{pools}"):
        section.add(Line(f"{name}: start of the fleet", time.perf_counter() - start, "s"))
        asyncio.run(measure(section, name))


async def measure(section: Section, name: str) -> None:
    prompt, output, rate, count = (
        (TINY_PROMPT, TINY_OUTPUT, TINY_RATE, TINY_REQUESTS) if section.rehearse else (PROMPT, OUTPUT, RATE, REQUESTS)
    )
    vocab_size = 250 if section.rehearse else 128_000
    async with client_of(ADDRESS, find_credentials(None, ADDRESS)) as client:

        async def one(number: int) -> Answer:
            await asyncio.sleep(max(0.0, number / rate))
            token_ids = random_prompt(prompt, vocab_size, number + 1)
            answer = await ask(client, token_ids, output, TIMEOUT_S, time.perf_counter())
            assert len(answer.times) == output, answer.error
            return answer

        await one(-1)  # the first hand-off also connects the workers
        lanes = {path.lane.value for _, path in paths_of(await client.fleet())}
        if lanes:
            section.note(f"{name}: hand-offs take the lane {', '.join(sorted(lanes))}")
        start = time.perf_counter()
        answers = await asyncio.gather(*[one(number) for number in range(count)])
        seconds = time.perf_counter() - start
    what = f"{name}, {rate:g} requests/s of {prompt:,} + {output} tokens"
    first, gaps = [answer.times[0] for answer in answers], [gap for answer in answers for gap in answer.gaps]
    section.add(Line(f"{what}: tokens", count * output / seconds, "/s"))
    for measure, values in (("TTFT", first), ("gap", gaps)):
        cuts = statistics.quantiles(values, n=100)
        for percent in (50, 90, 99):
            section.add(Line(f"{what}: {measure} p{percent}", cuts[percent - 1] * 1e3, "ms"))
