"""Tandem beside vLLM on one GPU: random weights of one 8B model, one client over HTTP, one system after the other.

    steps      seconds for each token of 1, 32 and 128 sequences that decode together; no token is streamed
    prompts    TTFT of a prompt that is alone
    load       prompts of 2,048 tokens and outputs of 128 at random times, the same ones for every system

vLLM has its defaults, but for `--max-model-len`, and once more with steps of at most 1,536 tokens. Tandem's systems are
one undivided worker whose steps are limited, two pools that share the GPU with the same limit, and one undivided worker
without a limit.

The limits of a request are those of somebody who reads along: TTFT of 500 ms, and 30 ms for each token after it on
average. A request is *smooth* if also no pause between two of its tokens is above 100 ms, which a mean
hides. Goodput is the number of requests inside the limits, for each second from the first arrival to the last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.asking import Answer, HttpServer, arrivals, ask_at, random_prompts, whole
from benchmarks.gpu_sections.harness import query_gpu
from benchmarks.gpu_sections.section import BIG_MODEL, TINY_MODEL, Section
from benchmarks.report import Line, percentile
from benchmarks.runner_driver import NO_LIMIT_MS
from cli.diagnosis.vllm_environment import python_of
from core.config import VllmConfig
from model_files.builtin_configs import RANDOM_CONFIGS
from tests.support.child_processes import serving, tandem
from tools.hf_model import RANDOM_WEIGHTS, write_model

GRPC_PORT, HTTP_PORT = 50_671, 50_672
VLLM_READY = "Application startup complete"
MAX_CONTEXT = 16_384
STEP_LIMIT_MS, STEP_TOKENS = 40.0, 1536  # about as long
VLLM = "vLLM"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    ttft: float = 0.5
    mean_gap: float = 0.03
    pause: float = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    token_ids: tuple[int, int] = (300, 128_000)
    batches: tuple[int, ...] = (1, 32, 128)
    context: int = 2048  # tokens of a sequence in `steps`
    short_output: int = 16
    long_output: int = 112
    prompts: tuple[int, ...] = (2048, 8192)
    repeats: int = 4
    rates: tuple[float, ...] = (7.0, 11.0, 14.0)  # requests a second
    load_s: float = 16.0
    prompt: int = 2048  # tokens of a request under load
    output: int = 128

    def random_prompt(self, num_tokens: int, seed: str) -> list[int]:
        return random_prompts(1, num_tokens, seed, self.token_ids)[0]


TINY = Sizes((3, 250), (1, 3), 40, 2, 66, (40,), 2, (20.0,), 0.5, 40, 8)
WAIT_FOR_MEMORY_S = 20.0
IDLE_MEMORY_MIB = 3000


@dataclass(frozen=True, slots=True)
class System:
    name: str
    started: Callable[[], AbstractContextManager[HttpServer]]
    seconds: float  # of the whole case
    alone: bool = False  # measure `steps` and `prompts`, too


def run(section: Section) -> None:
    if not section.has_fleets():
        return
    beside = Comparison(section, TINY if section.rehearse else Sizes())
    for system in systems(section):
        if section.has_time_for(system.seconds, system.name):
            with section.section(system.name):
                beside.measure(system)


def systems(section: Section) -> list[System]:
    """The most telling ones first."""
    undivided, shared = "[cluster]\nnum_prefill = 0\n", "[cluster]\n"
    if not section.rehearse:
        undivided += "decode_gpus = 0.9\n"
        shared += "prefill_gpus = 0.45\ndecode_gpus = 0.45\n"
    tables = {
        f"Tandem, steps of {STEP_LIMIT_MS:g} ms": f"{undivided}[scheduler]\nslo_itl_ms = {STEP_LIMIT_MS}\n",
        "Tandem, two pools": f"{shared}[scheduler]\nslo_itl_ms = {STEP_LIMIT_MS}\n",
        "Tandem, no limit": f"{undivided}[scheduler]\nslo_itl_ms = {NO_LIMIT_MS}\n",
    }
    found = [
        System(name, partial(tandem_server, section, text), 90.0, alone=not place)
        for place, (name, text) in enumerate(tables.items())
    ]
    if section.rehearse:
        return found[:-1]  # the last differs from the first in a number of its config
    if not section.has_vllm():
        return found
    small_steps = System(f"vLLM, steps of {STEP_TOKENS:,} tokens", partial(vllm_server, STEP_TOKENS), 125.0)
    return [System(VLLM, vllm_server, 150.0, alone=True), *found[:-1], small_steps, found[-1]]


# ---- servers


@contextlib.contextmanager
def tandem_server(section: Section, text: str) -> Iterator[HttpServer]:
    model, device = (TINY_MODEL, "cpu") if section.rehearse else (BIG_MODEL, "cuda")
    engine = f'[engine]\nmodel = "{model}"\ndevice = "{device}"\n'
    engine += "" if section.rehearse else f"max_context = {MAX_CONTEXT}\n"
    wait_for_memory(section)
    with tandem(GRPC_PORT, "--http", str(HTTP_PORT), config=engine + text):
        yield HttpServer(HTTP_PORT, model)


@contextlib.contextmanager
def vllm_server(step_tokens: int = 0) -> Iterator[HttpServer]:
    """`step_tokens`: 0 = vLLM's default."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model, RANDOM_CONFIGS["llama-3.1-8b"])
        options = ["--served-model-name", "model", "--port", str(HTTP_PORT), "--disable-uvicorn-access-log"]
        options += [*RANDOM_WEIGHTS, "--max-model-len", str(MAX_CONTEXT)]
        options += ["--max-num-batched-tokens", str(step_tokens)] if step_tokens else []
        command = [str(python_of(VllmConfig())), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]
        with serving(command, VLLM_READY, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}):
            yield HttpServer(HTTP_PORT, "model")


def wait_for_memory(section: Section) -> None:
    """A worker sizes its pool by the memory that is free, and a server that has ended frees it a moment later."""
    if section.rehearse:
        return
    deadline = time.monotonic() + WAIT_FOR_MEMORY_S
    while time.monotonic() < deadline:
        used = int(query_gpu("memory.used"))
        if used < IDLE_MEMORY_MIB:
            return
        time.sleep(0.5)
    section.note(f"{used:,} MiB of the GPU were still in use")


# ---- figures


class Comparison:
    """Figures by measure; those of vLLM are the peers of the others."""

    def __init__(self, section: Section, sizes: Sizes) -> None:
        self._section, self._sizes = section, sizes
        self._limits = Limits(*[60.0] * 3) if section.rehearse else Limits()
        self._of_vllm: dict[str, float] = {}

    def measure(self, system: System) -> None:
        start = time.perf_counter()
        with system.started() as server:
            self._add(system, "start", time.perf_counter() - start, "s")
            asyncio.run(self._measure(system, server))

    async def _measure(self, system: System, server: HttpServer) -> None:
        sizes = self._sizes
        warm_up = [sizes.random_prompt(sizes.prompt, f"{system.name}, warm-up {number}") for number in range(4)]
        for prompt in warm_up:  # the first one also compiles kernels and connects workers
            whole(await server.ask(prompt, sizes.output))
        await ask_all(server, warm_up, sizes.output)
        if system.alone:
            for num_tokens in sizes.prompts:
                await self._measure_prompt(system, server, num_tokens)
            for batch in sizes.batches:
                await self._measure_steps(system, server, batch)
        for rate in sizes.rates:
            await self._measure_load(system, server, rate)

    async def _measure_prompt(self, system: System, server: HttpServer, num_tokens: int) -> None:
        found = []
        for repeat in range(self._sizes.repeats):
            prompt = self._sizes.random_prompt(num_tokens, f"alone {num_tokens} {repeat}")
            found.append(whole(await server.ask(prompt, 2)).times[0])
        self._add(system, f"TTFT of {num_tokens:,} tokens alone", statistics.median(found) * 1e3, "ms", goal=1.0)

    async def _measure_steps(self, system: System, server: HttpServer, batch: int) -> None:
        """From two lengths of output, so that the prompts, which are cached, and the client cancel out."""
        sizes = self._sizes
        prompts = [sizes.random_prompt(sizes.context, f"step {number}") for number in range(batch)]

        async def seconds(num_tokens: int) -> float:
            start = time.perf_counter()
            await ask_all(server, prompts, num_tokens, stream=False)
            return time.perf_counter() - start

        await seconds(1)
        pairs = [(await seconds(sizes.short_output), await seconds(sizes.long_output)) for _ in range(2)]
        short, long = (min(pair[place] for pair in pairs) for place in (0, 1))
        step_ms = (long - short) / (sizes.long_output - sizes.short_output) * 1e3
        self._add(system, f"decode step of {batch} x {sizes.context:,}", step_ms, "ms", goal=1.0)

    async def _measure_load(self, system: System, server: HttpServer, rate: float) -> None:
        sizes = self._sizes
        times = arrivals(rate, round(rate * sizes.load_s))
        prompts = [sizes.random_prompt(sizes.prompt, f"load {rate:g} {number}") for number in range(len(times))]
        start = time.perf_counter()
        answers = await ask_at(times, lambda number, _: server.ask(prompts[number], sizes.output))
        seconds = time.perf_counter() - start
        self._report_load(system, rate, answers, seconds)

    def _report_load(self, system: System, rate: float, answers: Sequence[Answer], seconds: float) -> None:
        ended = [answer for answer in answers if not answer.error]
        if not ended:
            raise RuntimeError(f"{rate:g} requests/s: no answer: {answers[0].error}")
        at = f"{rate:g} requests/s"
        inside = sum(is_inside(answer, self._limits) for answer in answers)
        smooth = sum(is_inside(answer, self._limits, smooth=True) for answer in answers)
        self._add(system, f"{at}: goodput", inside / seconds, "requests/s", goal=1.2 if rate == self._knee else None)
        self._add(system, f"{at}: smooth goodput", smooth / seconds, "requests/s")
        tokens = sum(answer.num_tokens for answer in answers) / seconds
        first = [answer.times[0] * 1e3 for answer in ended]
        gaps = [gap * 1e3 for answer in ended for gap in answer.gaps]
        means = [1e3 * (answer.tpot_s or 0.0) for answer in ended]
        errors = [answer.error for answer in answers if answer.error]
        self._section.note(
            f"{system.name}, {at}: {tokens:,.0f} tokens/s; TTFT {cuts(first, 50, 90, 99)} ms; "
            f"gaps {cuts(gaps, 50, 99)}, longest {max(gaps, default=0.0):.0f} ms; mean gaps {cuts(means, 50, 90)} ms; "
            f"of {len(answers)} requests {inside / len(answers):.3f} inside, {smooth / len(answers):.3f} smooth"
            + (f"; {len(errors)} failed: {errors[0]}" if errors else "")
        )

    @property
    def _knee(self) -> float:
        return self._sizes.rates[-1]

    def _add(self, system: System, measure: str, value: float, unit: str, goal: float | None = None) -> None:
        if system.name == VLLM:
            self._of_vllm[measure] = value
        peer_value = None if system.name == VLLM else self._of_vllm.get(measure)
        peer = "" if peer_value is None else VLLM
        line = Line(f"{system.name}, {measure}", value, unit, peer, peer_value, least_ratio=goal if peer else None)
        self._section.add(line)


async def ask_all(server: HttpServer, prompts: Sequence[list[int]], num_tokens: int, stream: bool = True) -> None:
    """At once."""
    for answer in await asyncio.gather(*[server.ask(prompt, num_tokens, stream=stream) for prompt in prompts]):
        whole(answer)


def is_inside(answer: Answer, limits: Limits, smooth: bool = False) -> bool:
    if answer.error or answer.times[0] > limits.ttft or (answer.tpot_s or 0.0) > limits.mean_gap:
        return False
    return not smooth or max(answer.gaps, default=0.0) <= limits.pause


def cuts(values: Sequence[float], *percents: int) -> str:
    return ", ".join(f"p{percent} {percentile(values, percent / 100):.3g}" for percent in percents)
