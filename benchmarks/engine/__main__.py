"""The engine beside vLLM and llama.cpp on one core: `make bench-engine`.

    bare         prefill and decode in bfloat16, beside vLLM
    quantized    decode with int8 and int4 weights, beside bfloat16, and beside llama.cpp
    perplexity   of a text (TEXT=wiki.test.txt), by format of the weights and of the KV pool

Only the program differs between the rows of a peer, and only the format between the others: every program is a process
of its own, pinned to the same core, with the same prompts. The programs take turns within each repeat: a few steps of
one, then of the next. A peer that is not installed (`make bench-peers`) is reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.engine import programs
from benchmarks.engine.figures import (
    BATCHES,
    CONTEXTS,
    FORMATS,
    LLAMA,
    OURS,
    PLAIN,
    PROMPTS,
    QUANTIZED_CONTEXT,
    VLLM,
    Figures,
    start_line,
)
from benchmarks.engine.programs import Start
from benchmarks.report import Line, Report, parser_of, run_parts
from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.runner import GpuRunner
from engine.torch_runner import TorchRunner
from model_files.model_source import load_config, resolve_model
from tests.support.child_processes import ChildEnded, ChildProcess
from text.tokenizer import load_tokenizer
from tools.install_peers import MODEL

STEPS = 5  # of one program before the next one's turn; an uncounted step before them warms the caches
PROMPTS_PER_REPEAT = 3  # of each length: one turn of decode is several steps, one turn of prefill is one prompt
SHORT_PROMPT = 16  # tokens, of a program's first answer
KV_TOKENS_SHARE = 8  # a KV pool is compared on so much less of the text, because the references compute slowly
PARTS = ("bare", "quantized", "perplexity")
FP8 = "fp8"  # kernels of GPUs alone: on a CPU its quality is measured, not its speed
MOST_PERPLEXITY = {"int8": 1.005, "int4": 1.04, FP8: 1.04}  # times bfloat16's
MOST_KV_PERPLEXITY = 1.02  # times that of a bfloat16 pool on the same runner
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

MakeRunner = Callable[[EngineConfig], TorchRunner | GpuRunner]


@contextlib.contextmanager
def running(starts: dict[str, Start | None], core: int, report: Report) -> Iterator[dict[str, ChildProcess]]:
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
            report.add(start_line(name, time.perf_counter() - started_at))
        if not found.keys() & {OURS, PLAIN}:
            raise RuntimeError("Tandem's engine did not start")
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
                figures.step_ms[name, context, batch] += program.call("steps", count=STEPS + 1)["ms"][1:]


def measure_prefill(running: dict[str, ChildProcess], repeats: int, figures: Figures) -> None:
    for tokens in PROMPTS:
        for _ in range(repeats * PROMPTS_PER_REPEAT):
            for name, program in running.items():
                figures.prefill_ms[name, tokens].append(program.call("prefill", tokens=tokens)["ms"])


# ---- perplexity: exp of the mean negative log-probability of the tokens of a text
#
# The text is cut into windows, and the second half of each window is scored. The first half is one chunk, as a prompt
# is; each scored token is a chunk of its own, as in decoding. Kernels, KV cache and rounding are those of serving. KV
# pools are compared on the references of the GPU's operators, which round as its kernels do.


def window_loss(runner: TorchRunner | GpuRunner, window: Sequence[int], block_size: int) -> float:
    """Sum of -log p over the second half of the window, in blocks 0 and up of the pool."""
    table = list(range(-(-len(window) // block_size)))
    known = len(window) // 2

    def chunk(start: int, num_tokens: int, samples: bool) -> ScheduledChunk:
        return ScheduledChunk(
            SequenceView(f"{start}", window, len(window), table, GREEDY), start, num_tokens, samples, False
        )

    runner.logits([chunk(0, known - 1, False)])
    logits = runner.logits([chunk(place, 1, True) for place in range(known - 1, len(window) - 1)])
    return float(F.cross_entropy(logits, torch.tensor(window[known:]), reduction="sum"))


def perplexity_of(config: EngineConfig, token_ids: Sequence[int], context: int, make_runner: MakeRunner) -> float:
    if len(token_ids) < context:
        raise ValueError(f"the text has {len(token_ids)} tokens and needs {context}")
    runner = make_runner(config)
    windows = [token_ids[start : start + context] for start in range(0, len(token_ids) - context + 1, context)]
    loss = sum(window_loss(runner, window, config.block_size) for window in windows)
    runner.close()
    return math.exp(loss / (len(windows) * (context - context // 2)))


class Benchmark:
    """Each public method is a part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.report = Report("engine")
        self._arguments = arguments
        self._figures = Figures(load_config(resolve_model(MODEL)))
        self._core = max(os.sched_getaffinity(0))
        self._plain = EngineConfig(model=MODEL, dtype="bfloat16", num_threads=1, kv_memory_mb=2048)

    def bare(self) -> None:
        """Prefill and decode of the bare engines, in bfloat16."""
        report, figures, repeats = self.report, self._figures, self._arguments.repeats
        starts: dict[str, Start | None] = {
            OURS: programs.tandem(OURS, self._plain), VLLM: programs.vllm(self._core),
        }  # fmt: skip
        with running(starts, self._core, report) as found:
            figures.take_floors(found[OURS].call("floors"))
            with report.section("prefill"):
                measure_prefill(found, repeats, figures)
                self._add(figures.prefill_lines())
            for context in CONTEXTS:
                with report.section(f"decode, context {context}"):
                    measure_decode(found, context, repeats, figures)
                    figures.take_floors(found[OURS].call("floors"))
                    self._add(figures.decode_lines(context))
            self._add(figures.floor_lines())

    def quantized(self) -> None:
        """Decode with quantized weights beside bfloat16, and beside llama.cpp."""
        small = replace(self._plain, kv_memory_mb=512)
        starts: dict[str, Start | None] = {PLAIN: programs.tandem(PLAIN, small)}
        for name in FORMATS:
            starts[f"{OURS} {name}"] = programs.tandem(f"{OURS} {name}", replace(small, quantization=name))
        with running(starts | {LLAMA: programs.llama()}, self._core, self.report) as found:
            measure_decode(found, QUANTIZED_CONTEXT, self._arguments.repeats, self._figures)
        self._add(self._figures.quantized_lines())

    def perplexity(self) -> None:
        if self._arguments.text is None:
            self.report.say("perplexity needs a text, and is left out: --text wiki.test.txt")
            return
        token_ids = load_tokenizer(MODEL).encode(self._arguments.text.read_text(encoding="utf-8"))
        config, context = replace(self._plain, kv_memory_mb=64), self._arguments.context
        text = token_ids[: self._arguments.tokens]
        weights = {name: (replace(config, quantization=name), most) for name, most in MOST_PERPLEXITY.items()}
        self._compare("weights", config, weights, lambda one: perplexity_of(one, text, context, TorchRunner))
        start, runner = text[: max(context, len(text) // KV_TOKENS_SHARE)], partial(GpuRunner, with_graphs=False)
        pools = {FP8: (replace(config, kv_dtype=FP8), MOST_KV_PERPLEXITY)}
        self._compare("KV", config, pools, lambda one: perplexity_of(one, start, context, runner))

    def _compare(
        self, of: str, plain: EngineConfig, others: Mapping[str, tuple[EngineConfig, float]],
        measure: Callable[[EngineConfig], float],
    ) -> None:  # fmt: skip
        beside = measure(plain)
        self.report.add(Line(f"perplexity, bfloat16 {of}", beside, ""))
        for name, (config, most) in others.items():
            found = measure(config)
            self.report.add(Line(f"perplexity, {name} {of}", found, ""))
            self.report.add(Line(f"perplexity, {name} {of}, beside bfloat16", found / beside, "x", most=most))

    def _add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.report.add(line)


def main() -> None:
    parser = parser_of(__doc__, PARTS, repeats=5)
    parser.add_argument("--text", type=Path, help="of the perplexity, e.g. the test part of WikiText-2")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window of the text")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the text, from its start")
    arguments = parser.parse_args()
    benchmark = Benchmark(arguments)
    benchmark.report.say(f"medians of {arguments.repeats} interleaved repeats of {STEPS} steps")
    run_parts(benchmark.report, {part: getattr(benchmark, part) for part in PARTS}, arguments.parts)


if __name__ == "__main__":
    main()
