"""Quantized weights beside bfloat16: the speed of their products, and the perplexity of a text; and an fp8 KV pool.

Speed: all matrix products of a step of SmolLM2-135M, by number of rows, on one thread. Inputs and weights are random.
SwiGLU's activation is included. The head multiplies at most 32 rows, as where 32 sequences sample.

Quality: the perplexity of a text, exp of the mean negative log-probability of its tokens. The text is cut into windows,
and the second half of each window is scored. The first half is one chunk, as a prompt is; each scored token is a chunk
of its own, as in decoding. Kernels, KV cache and rounding are those of serving. KV pools are compared on the references
of the GPU's operators, which round as its kernels do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.report import Line, Report
from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.backend import choose_linear_method, find_kernels
from engine.gpu.runner import GpuRunner
from engine.linear import Linear, LinearMethod, Matrix
from engine.model_weights import ModelWeights, allocate_weights
from engine.quantization import QuantizedMatrix
from engine.torch_runner import TorchRunner
from model_files.builtin_configs import RANDOM_CONFIGS

CONFIG = RANDOM_CONFIGS["smollm2-135m"]
PLAIN, FORMATS = "none", ("int8", "int4")
FP8 = "fp8"  # kernels of GPUs alone: on a CPU its quality is measured, not its speed
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
MAX_HEAD_ROWS = 32
MOST_PERPLEXITY = {"int8": 1.005, "int4": 1.04, FP8: 1.04}  # times bfloat16's
MOST_KV_PERPLEXITY = 1.02  # times that of a bfloat16 pool on the same runner
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


# ---- speed


def filled(matrix: Matrix) -> Matrix:
    if isinstance(matrix, QuantizedMatrix):
        matrix.codes.random_()
        matrix.scales.fill_(0.01)
    else:
        assert isinstance(matrix, torch.Tensor)
        matrix.normal_()
    return matrix


def prepared(method: LinearMethod, weights: ModelWeights) -> Iterator[tuple[Linear, int]]:
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.output, layer.down):
            yield method.prepare(filled(matrix), None), matrix.shape[1]
        yield method.prepare_gated(filled(layer.gate_up)), layer.gate_up.shape[1]
    yield method.prepare_head(filled(weights.head)), weights.head.shape[1]


def products(quantization: str) -> list[tuple[Linear, int]]:
    """(product, size of its inputs) of each matrix, the head's last."""
    config = EngineConfig(quantization=quantization)
    method: LinearMethod = choose_linear_method(config, find_kernels(config, CONFIG, CPU, None), 1)
    return list(prepared(method, allocate_weights(CONFIG, torch.bfloat16, CPU, quantization)))


def step_ms(step: list[tuple[Linear, int]], inputs: dict[int, torch.Tensor]) -> float:
    start = time.perf_counter()
    *layers, (head, size) = step
    for multiply, in_size in layers:
        multiply(inputs[in_size])
    head(inputs[size][:MAX_HEAD_ROWS])
    return (time.perf_counter() - start) * 1e3


def speed(report: Report, rows: Sequence[int], repeats: int) -> None:
    torch.set_num_threads(1)
    steps = {name: products(name) for name in (PLAIN, *FORMATS)}
    for num_rows in rows:
        inputs = {size: torch.randn(num_rows, size).bfloat16() for size in (576, 1536)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        with torch.inference_mode():
            for _ in range(repeats):
                for name, step in steps.items():
                    times[name].append(step_ms(step, inputs))
        plain = statistics.median(times[PLAIN])
        report.add(Line(f"{num_rows} rows, bfloat16", plain, "ms"))
        for name in FORMATS:
            found = statistics.median(times[name])
            report.add(Line(f"{num_rows} rows, {name}", found, "ms", "bfloat16", plain, least_ratio=1.0))


# ---- quality


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


def perplexity(
    config: EngineConfig,
    token_ids: Sequence[int],
    context: int,
    make_runner: Callable[[EngineConfig], TorchRunner | GpuRunner] = TorchRunner,
) -> float:
    runner = make_runner(config)
    windows = [token_ids[start : start + context] for start in range(0, len(token_ids) - context + 1, context)]
    loss = sum(window_loss(runner, window, config.block_size) for window in windows)
    runner.close()
    return math.exp(loss / (len(windows) * (context - context // 2)))


def quality(report: Report, config: EngineConfig, token_ids: Sequence[int], context: int) -> None:
    if len(token_ids) < context:
        raise ValueError(f"the text has {len(token_ids)} tokens and needs {context}")
    plain = perplexity(config, token_ids, context)
    report.add(Line("perplexity, bfloat16 weights", plain, ""))
    for name in (*FORMATS, FP8):
        found = perplexity(replace(config, quantization=name), token_ids, context)
        report.add(Line(f"perplexity, {name} weights", found, ""))
        times = Line(f"perplexity, {name} weights, beside bfloat16", found / plain, "x", most=MOST_PERPLEXITY[name])
        report.add(times)


def gpu_runner(config: EngineConfig) -> GpuRunner:
    """The runner of a GPU: on a CPU, with the references of its operators."""
    return GpuRunner(config, with_graphs=False)


def kv_quality(report: Report, config: EngineConfig, token_ids: Sequence[int], context: int) -> None:
    plain = perplexity(config, token_ids, context, gpu_runner)
    report.add(Line("perplexity, bfloat16 KV", plain, ""))
    found = perplexity(replace(config, kv_dtype=FP8), token_ids, context, gpu_runner)
    report.add(Line("perplexity, fp8 KV", found, ""))
    report.add(Line("perplexity, fp8 KV, beside bfloat16", found / plain, "x", most=MOST_KV_PERPLEXITY))
