"""All matrix products of a step of SmolLM2-135M, by number of rows and kind of weights: `make bench-matrices`.

Random numbers in the shapes of the model, one thread; the kinds take turns, and medians are told. SwiGLU's activation
is in them. The head multiplies at most 32 rows, as where 32 sequences sample. The goal of int8 and int4: at no number
of rows slower than bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.report import Line, Report
from core.config import EngineConfig
from engine.backend import choose_linear_method, find_kernels
from engine.linear import Linear, LinearMethod, Matrix
from engine.model_weights import ModelWeights, allocate_weights
from engine.quantization import QuantizedMatrix
from model_files.builtin_configs import RANDOM_CONFIGS

CONFIG = RANDOM_CONFIGS["smollm2-135m"]
KINDS = ("none", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_HEAD_ROWS = 32
CPU = torch.device("cpu")


def filled(matrix: Matrix) -> Matrix:
    if isinstance(matrix, QuantizedMatrix):
        matrix.codes.random_()
        matrix.scales.fill_(0.01)
    else:
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
    method: LinearMethod = choose_linear_method(config, find_kernels(config, CONFIG, CPU, None), CPU, 1)
    weights = allocate_weights(CONFIG, torch.bfloat16, CPU, quantization)
    return list(prepared(method, weights))


def step_ms(all_products: list[tuple[Linear, int]], inputs: dict[int, torch.Tensor]) -> float:
    start = time.perf_counter()
    *layers, (head, size) = all_products
    for multiply, in_size in layers:
        multiply(inputs[in_size])
    head(inputs[size][:MAX_HEAD_ROWS])
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrix products of a step, by kind of weights")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("matrices")
    kinds = {kind: products(kind) for kind in KINDS}
    for num_rows in ROWS:
        inputs = {size: torch.randn(num_rows, size).bfloat16() for size in (576, 1536)}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with torch.inference_mode():
            for _ in range(arguments.repeats):
                for kind, its_products in kinds.items():
                    times[kind].append(step_ms(its_products, inputs))
        plain, *others = (statistics.median(times[kind]) for kind in KINDS)
        report.add(Line(f"{num_rows} rows, bfloat16", "", plain, "ms"))
        for kind, found in zip(KINDS[1:], others, strict=True):
            goal = "no slower than bfloat16"
            report.add(Line(f"{num_rows} rows, {kind}", goal, found, "ms", "bfloat16", plain / found, found <= plain))
    report.write()


if __name__ == "__main__":
    main()
