"""The engine beside vLLM and llama.cpp, on one core each, in one run: `make bench-engine`.

Every program is a process of its own, pinned to the same core, and they take turns: each repeat of a cell runs a few
steps of one, then of the next. Medians are printed beside the goals, with the share of the floor (bytes over the core's
read bandwidth or FLOP over its matrix product, both measured in this run), written to build/bench/engine.json and,
with `--write`, into docs/performance.md. A cell that misses its goal is printed as missed. Peers that are not
installed (`make bench-peers`) are left out, and said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import engine_serving, startup
from benchmarks.engine_figures import (
    BATCHES,
    CONTEXTS,
    LLAMA,
    OURS,
    PLAIN,
    PROMPTS,
    QUANTIZED_CONTEXT,
    VLLM,
    WEIGHT_BYTES,
    Figures,
)
from benchmarks.engine_page import section, write_page
from benchmarks.engine_peers import Launch, PeerFailed, Program, launch_llama, launch_tandem, launch_vllm
from benchmarks.report import Report, load
from core.config import EngineConfig
from model_files.model_source import load_config, resolve_model

STEPS = 5  # of one program before the next has its turn; the first one warms the caches and is not counted
PROMPTS_PER_REPEAT = 3  # of each length; between two of a program each of the others has one
FORMATS = ("int8", "int4")  # of weights, beside the plain one
FLEET_STARTS = 3
PARTS = ("decode", "prefill", "quantized", "serving", "startup")


@contextlib.contextmanager
def running(
    launches: dict[str, Launch | None], core: int, report: Report, figures: Figures
) -> Iterator[dict[str, Program]]:
    """The programs that can be had, each ready; their times to the first token are taken on the way."""
    programs: dict[str, Program] = {}
    try:
        for name, launch in launches.items():
            if launch is None:
                report.say(f"{name} is not installed and left out; `make bench-peers` installs it")
                continue
            programs[name] = Program(name, launch, core)
            try:
                figures.first_token_s[name] = programs[name].first_token_s()
            except PeerFailed as error:
                report.say(f"left out: {error}")
                programs.pop(name).stop()
        yield programs
    finally:
        for program in programs.values():
            program.stop()


def measure_decode(programs: dict[str, Program], context: int, repeats: int, figures: Figures) -> None:
    """Every batch size at one context, the programs in turn. Batches only shrink: sequences end, none begins."""
    for name, program in programs.items():
        program.call("fill", batch=1 if name == LLAMA else max(BATCHES), context=context)
    for batch in BATCHES:
        here = {name: program for name, program in programs.items() if name != LLAMA or batch == 1}
        for program in here.values():
            program.call("keep", batch=batch)
        for _ in range(repeats):
            for name, program in here.items():
                for part, values in program.steps(STEPS + 1).items():
                    figures.steps[name, context, batch, part] += values[1:]


def measure_prefill(programs: dict[str, Program], repeats: int, figures: Figures) -> None:
    """A turn is one prompt, where in decode it is several steps: so there are more turns."""
    for tokens in PROMPTS:
        for _ in range(repeats * PROMPTS_PER_REPEAT):
            for name, program in programs.items():
                figures.prefill_ms[name, tokens].append(program.prefill(tokens))


def run(arguments: argparse.Namespace, report: Report, figures: Figures) -> None:
    core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
    plain = EngineConfig(model=arguments.model, dtype="bfloat16", num_threads=1, kv_memory_mb=2048)
    launches: dict[str, Launch | None] = {OURS: launch_tandem(plain)}
    if arguments.peers:
        launches[VLLM] = launch_vllm(arguments.model, core)
    with running(launches, core, report, figures) as programs:
        figures.take_floors(programs[OURS].call("floors"), programs[OURS].call("about"))
        if "prefill" in arguments.parts:
            measure_prefill(programs, arguments.repeats, figures)
        for context in CONTEXTS if "decode" in arguments.parts else ():
            measure_decode(programs, context, arguments.repeats, figures)
        figures.take_floors(programs[OURS].call("floors"), programs[OURS].call("about"))
    if "serving" in arguments.parts:
        small = replace(plain, kv_memory_mb=768)
        figures.serving_share = engine_serving.measure(small, core, max(BATCHES), QUANTIZED_CONTEXT)
    if "quantized" in arguments.parts:
        small = replace(plain, kv_memory_mb=512)
        launches = {PLAIN: launch_tandem(small)}
        launches |= {f"{OURS} {name}": launch_tandem(replace(small, quantization=name)) for name in FORMATS}
        if arguments.peers:
            launches[LLAMA] = launch_llama(arguments.model)
        with running(launches, core, report, figures) as programs:
            measure_decode(programs, QUANTIZED_CONTEXT, arguments.repeats, figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue or a .gguf file")
    parser.add_argument("--repeats", type=int, default=5, help="of each cell (default 5)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--core", type=int, help="default: the last of those that this process may use")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="ours alone")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    arguments = parser.parse_args()
    report, figures = Report("engine"), Figures(load_config(resolve_model(arguments.model)))
    before = load()
    report.say(f"medians of {arguments.repeats} interleaved repeats of {STEPS} steps; {before}")
    run(arguments, report, figures)
    cells, others = list(figures.cells()), list(figures.other_lines())
    if "startup" in arguments.parts:
        config = EngineConfig(model=arguments.model)
        starts = [startup.start_fleet(config.model, config.kv_memory_mb) for _ in range(FLEET_STARTS)]
        others += startup.lines(starts, config, sum(figures.num_weights()) * WEIGHT_BYTES)
    for line in [line for cell in cells for line in cell.lines()] + others:
        report.add(line)
    report.write()
    if arguments.write:
        write_page(section(f"medians of {arguments.repeats} repeats, {before}.", cells, others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
