"""The perplexity of a text with quantized weights and KV: exp of the mean negative log-probability of its tokens.

The text is cut into windows, and the second half of each window is scored. The first half is one chunk, as a prompt is;
each scored token is a chunk of its own, as in decoding. Kernels, KV cache and rounding are those of serving. KV pools
are compared on the references of the GPU's operators, which round as its kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.report import Line, Report
from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.runner import GpuRunner
from engine.torch_runner import TorchRunner

FP8 = "fp8"  # kernels of GPUs alone: on a CPU its quality is measured, not its speed
MOST_PERPLEXITY = {"int8": 1.005, "int4": 1.04, FP8: 1.04}  # times bfloat16's
MOST_KV_PERPLEXITY = 1.02  # times that of a bfloat16 pool on the same runner
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

MakeRunner = Callable[[EngineConfig], TorchRunner | GpuRunner]


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


def perplexity(config: EngineConfig, token_ids: Sequence[int], context: int, make_runner: MakeRunner) -> float:
    if len(token_ids) < context:
        raise ValueError(f"the text has {len(token_ids)} tokens and needs {context}")
    runner = make_runner(config)
    windows = [token_ids[start : start + context] for start in range(0, len(token_ids) - context + 1, context)]
    loss = sum(window_loss(runner, window, config.block_size) for window in windows)
    runner.close()
    return math.exp(loss / (len(windows) * (context - context // 2)))


def gpu_runner(config: EngineConfig) -> GpuRunner:
    """The runner of a GPU: on a CPU, with the references of its operators."""
    return GpuRunner(config, with_graphs=False)


def weights(report: Report, config: EngineConfig, token_ids: Sequence[int], context: int) -> None:
    changed = {name: (replace(config, quantization=name), most) for name, most in MOST_PERPLEXITY.items()}
    _compare(report, "weights", (config, changed), lambda one: perplexity(one, token_ids, context, TorchRunner))


def kv(report: Report, config: EngineConfig, token_ids: Sequence[int], context: int) -> None:
    changed = {FP8: (replace(config, kv_dtype=FP8), MOST_KV_PERPLEXITY)}
    _compare(report, "KV", (config, changed), lambda one: perplexity(one, token_ids, context, gpu_runner))


def _compare(
    report: Report,
    of: str,
    configs: tuple[EngineConfig, dict[str, tuple[EngineConfig, float]]],
    measure: Callable[[EngineConfig], float],
) -> None:
    plain = measure(configs[0])
    report.add(Line(f"perplexity, bfloat16 {of}", plain, ""))
    for name, (config, most) in configs[1].items():
        found = measure(config)
        report.add(Line(f"perplexity, {name} {of}", found, ""))
        report.add(Line(f"perplexity, {name} {of}, beside bfloat16", found / plain, "x", most=most))
