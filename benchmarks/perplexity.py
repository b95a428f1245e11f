"""What quantization costs in quality: perplexity of a text, each kind of weights beside bfloat16 of the same source.

The text is cut into windows of `--context` tokens, and the second half of each is scored: exp of the mean negative
log-probability of its tokens, each given all before it in the window. The first half is a step of one chunk, as a
prompt is; each scored token is a chunk of its own in one further step, as in decoding, so that the engine says what
follows it. Kernels, KV cache and rounding are those that serve. `make bench-perplexity TEXT=...` prints it and writes
build/bench/perplexity.json.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.report import Line, Report
from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk
from engine.model import Model
from engine.torch_runner import TorchRunner
from model_files.catalogue import fetch
from text.tokenizer import load_tokenizer

MOST_MORE = {"int8": 0.005, "int4": 0.04}  # the goals: this share more than bfloat16
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def window_loss(model: Model, window: Sequence[int], block_size: int) -> float:
    """Sum of -log p over the second half of the window, in blocks 0 and up of the model's pool."""
    table = list(range(-(-len(window) // block_size)))
    known = len(window) // 2

    def chunk(start: int, num_tokens: int, samples: bool) -> ScheduledChunk:
        return ScheduledChunk(f"{start}", window, len(window), start, num_tokens, table, samples, _GREEDY)

    with torch.inference_mode():
        model.forward([chunk(0, known - 1, False)])
        logits = model.forward([chunk(place, 1, True) for place in range(known - 1, len(window) - 1)])
        return float(F.cross_entropy(logits, torch.tensor(window[known:]), reduction="sum"))


def perplexity(config: EngineConfig, token_ids: Sequence[int], context: int) -> float:
    runner = TorchRunner(config)
    assert runner._model is not None
    starts = range(0, len(token_ids) - context + 1, context)
    windows = [token_ids[start : start + context] for start in starts]
    loss = sum(window_loss(runner._model, window, config.block_size) for window in windows)
    runner.close()
    return math.exp(loss / (len(windows) * (context - context // 2)))


def compare(report: Report, config: EngineConfig, token_ids: Sequence[int], context: int) -> None:
    """One line for bfloat16 and one for each quantization."""
    plain = 0.0
    for quantization in ("none", *MOST_MORE):
        start = time.perf_counter()
        found = perplexity(replace(config, quantization=quantization), token_ids, context)
        name = f"perplexity, {'bfloat16' if quantization == 'none' else quantization} weights"
        if quantization == "none":
            plain = found
            report.add(Line(name, "", found, "", "", None, None))
        else:
            limit = 1 + MOST_MORE[quantization]
            goal = f"at most {limit:g} x bfloat16"
            report.add(Line(name, goal, found, "", "bfloat16", plain / found, found <= limit * plain))
        report.say(f"  x {found / plain:.5f} of bfloat16, in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of quantized weights beside bfloat16")
    parser.add_argument("--text", type=Path, required=True, help="a text file, e.g. the test part of WikiText-2")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the text, from its beginning; 0 = all of it")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.model == "smollm2-135m":
        fetch(arguments.model)
    token_ids = load_tokenizer(arguments.model).encode(arguments.text.read_text(encoding="utf-8"))
    token_ids = token_ids[: arguments.tokens or len(token_ids)]
    report = Report("perplexity")
    num_windows, context = len(token_ids) // arguments.context, arguments.context
    report.say(
        f"{arguments.model}, {arguments.text.name}: {num_windows} windows of {context} tokens, half of them scored"
    )
    config = EngineConfig(model=arguments.model, dtype="bfloat16", kv_memory_mb=64, num_threads=arguments.threads)
    compare(report, config, token_ids, context)
    report.write()


if __name__ == "__main__":
    main()
