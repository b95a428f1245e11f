"""The engine beside vLLM and llama.cpp on one core: `make bench-engine`.

Every program is a process of its own, pinned to the same core. The programs take turns within each repeat: a few steps
of one, then of the next. A peer that is not installed (`make bench-peers`) is reported and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.asking import ask_worker, random_prompts
from benchmarks.engine import programs
from benchmarks.engine.figures import (
    BATCHES,
    CONTEXTS,
    FORMATS,
    LLAMA,
    MIN_STEPS,
    OURS,
    PLAIN,
    PROMPTS,
    QUANTIZED_CONTEXT,
    VLLM,
    Figures,
    percent_around,
)
from benchmarks.engine.programs import Start
from benchmarks.processes import ChildEnded, ChildProcess
from benchmarks.report import Report
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model

STEPS = 5  # of one program before the next one's turn; an uncounted step before them warms the caches
PROMPTS_PER_REPEAT = 3  # of each length: one turn of decode is several steps, one turn of prefill is one prompt
SHORT_PROMPT = 16  # tokens, of a program's first answer
SERVED_TOKENS = 512  # at most, of each stream of a serving worker; the pool has room for all of them
PARTS = ("prefill", "decode", "serving", "quantized")


@contextlib.contextmanager
def running(
    starts: dict[str, Start | None], core: int, report: Report, figures: Figures
) -> Iterator[dict[str, ChildProcess]]:
    """Start the programs one after another and record each one's time to its first token."""
    with contextlib.ExitStack() as stack:
        found: dict[str, ChildProcess] = {}
        for name, start in starts.items():
            if start is None:
                report.say(f"{name} is not installed and left out; `make bench-peers` installs it")
                continue
            started_at = time.perf_counter()
            program = start(core)
            stack.callback(program.stop)
            try:
                program.call("prefill", tokens=SHORT_PROMPT)
            except ChildEnded as error:
                report.say(f"left out: {error}")
                continue
            found[name] = program
            figures.first_token_s[name] = time.perf_counter() - started_at
        if not found.keys() & {OURS, PLAIN}:
            raise SystemExit("Tandem's engine did not start")
        yield found


def measure_decode(running: dict[str, ChildProcess], context: int, repeats: int, figures: Figures) -> None:
    """Every batch size at one context. Batches only shrink: sequences end, and none is added."""
    for name, program in running.items():
        program.call("fill", batch=1 if name == LLAMA else max(BATCHES), context=context)
    for batch in BATCHES:
        turns = {name: program for name, program in running.items() if name != LLAMA or batch == 1}
        for program in turns.values():
            program.call("keep", batch=batch)
        for _ in range(repeats):
            for name, program in turns.items():
                for part, values in program.call("steps", count=STEPS + 1).items():
                    figures.steps[name, context, batch, part] += values[1:]


def measure_prefill(running: dict[str, ChildProcess], repeats: int, figures: Figures) -> None:
    for tokens in PROMPTS:
        for _ in range(repeats * PROMPTS_PER_REPEAT):
            for name, program in running.items():
                figures.prefill_ms[name, tokens].append(program.call("prefill", tokens=tokens)["ms"])


def measure_serving(config: EngineConfig, core: int) -> float:
    """The percentage of a step outside the model while a decode worker streams its largest batch to this process.

    Prompts are computed beside the decodes of those before, as many tokens a step as its budget leaves. So the streams
    go on until all have decoded together for long enough, however late the last one began.
    """
    worker = programs.tandem("a decode worker", config, serve_on_core=core)(None)
    try:
        prompts = random_prompts(max(BATCHES), QUANTIZED_CONTEXT)
        asyncio.run(ask_worker(worker.call("address"), prompts, SERVED_TOKENS, num_together=2 * MIN_STEPS))
        return percent_around(worker.call("model_steps"), max(BATCHES))
    finally:
        worker.stop()


def run(arguments: argparse.Namespace, report: Report, figures: Figures) -> None:
    core = max(os.sched_getaffinity(0))
    plain = EngineConfig(model=arguments.model, dtype="bfloat16", num_threads=1, kv_memory_mb=2048)
    if {"prefill", "decode"} & set(arguments.parts):
        starts: dict[str, Start | None] = {OURS: programs.tandem(OURS, plain)}
        starts |= {VLLM: programs.vllm(core)} if arguments.peers else {}
        with running(starts, core, report, figures) as found:
            figures.take_floors(found[OURS].call("floors"))
            if "prefill" in arguments.parts:
                measure_prefill(found, arguments.repeats, figures)
            for context in CONTEXTS if "decode" in arguments.parts else ():
                measure_decode(found, context, arguments.repeats, figures)
            figures.take_floors(found[OURS].call("floors"))
    if "serving" in arguments.parts:
        figures.serving_percent = measure_serving(replace(plain, kv_memory_mb=768), core)
    if "quantized" in arguments.parts:
        small = replace(plain, kv_memory_mb=512)
        starts = {PLAIN: programs.tandem(PLAIN, small)}
        for name in FORMATS:
            starts[f"{OURS} {name}"] = programs.tandem(f"{OURS} {name}", replace(small, quantization=name))
        starts |= {LLAMA: programs.llama()} if arguments.peers else {}
        with running(starts, core, report, figures) as found:
            measure_decode(found, QUANTIZED_CONTEXT, arguments.repeats, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="with another model the peers have to be left out")
    parser.add_argument("--repeats", type=int, default=5, help="of each cell (default 5)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="measure Tandem alone")
    arguments = parser.parse_args()
    report, figures = Report("engine"), Figures(load_config(resolve_model(arguments.model)))
    report.say(f"medians of {arguments.repeats} interleaved repeats of {STEPS} steps")
    run(arguments, report, figures)
    for line in figures.lines():
        report.add(line)
    report.write()


if __name__ == "__main__":
    main()
