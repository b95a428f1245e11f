"""The figures of `make bench-engine`: what the programs measured becomes lines with peers, floors and goals.

The floor of a decode step is the longer of two times: reading the weights and the batch's KV once at the core's read
bandwidth, and the step's multiplications at the core's matrix product. A prompt's floor is its multiplications.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.report import Line
from engine.model_weights import allocate_weights
from model_files.model_config import ModelConfig

OURS, PLAIN, VLLM, LLAMA = "Tandem", "Tandem bfloat16", "vLLM", "llama.cpp"
FORMATS = ("int4", "int8")  # of weights
BATCHES, CONTEXTS, PROMPTS = (32, 8, 1), (512, 2048), (512, 1024, 1900)
QUANTIZED_CONTEXT = 512
LEAST_SPEED = {VLLM: 1.25, LLAMA: 1.0, PLAIN: 1.0}  # times the peer's
MOST_START_S = 5.0
WEIGHT_BYTES = 2  # of a bfloat16


def num_weights(model: ModelConfig) -> tuple[int, int]:
    """(weights that every token is multiplied by, weights of the head)"""
    weights = allocate_weights(model, torch.bfloat16, torch.device("meta"))
    count = sum(math.prod(slot.shape) for slot in weights.slots().values())
    head = model.vocab_size * model.hidden_size
    return count - (head if model.tie_embeddings else 2 * head), head


@dataclass
class Figures:
    model: ModelConfig
    step_ms: dict[tuple[str, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    prefill_ms: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    read_bytes_per_s: float = 0.0
    flop_per_s: float = 0.0
    kv_bytes_per_token: float = 0.0

    def take_floors(self, floors: dict[str, float]) -> None:
        """The fastest measurement counts: whatever disturbs one only slows it."""
        self.read_bytes_per_s = max(self.read_bytes_per_s, floors["read_bytes_per_s"])
        self.flop_per_s = max(self.flop_per_s, floors["flop_per_s"])
        self.kv_bytes_per_token = floors["kv_bytes_per_token"]

    def step(self, name: str, context: int, batch: int) -> float | None:
        values = self.step_ms.get((name, context, batch))
        return statistics.median(values) if values else None

    def decode_floor_ms(self, context: int, batch: int) -> float:
        count = sum(num_weights(self.model))
        read = count * WEIGHT_BYTES + batch * context * self.kv_bytes_per_token
        return 1e3 * max(read / self.read_bytes_per_s, 2 * count * batch / self.flop_per_s)

    def prefill_floor(self, tokens: int) -> float:
        """In tokens/s. Each token attends to half of the prompt on average, for the scores and for the values."""
        body, head = num_weights(self.model)
        attention = 2 * self.model.num_layers * self.model.num_heads * self.model.head_dim * tokens**2
        return tokens / ((2 * body * tokens + 2 * head + attention) / self.flop_per_s)

    # ---- lines

    def prefill_lines(self) -> Iterator[Line]:
        for tokens in PROMPTS:
            if ours := self._tokens_per_s(OURS, tokens):
                yield Line(f"prefill, bf16, {tokens} tokens", ours, "tokens/s", VLLM, self._tokens_per_s(VLLM, tokens),
                           self.prefill_floor(tokens), LEAST_SPEED[VLLM])  # fmt: skip

    def decode_lines(self, context: int) -> Iterator[Line]:
        for batch in reversed(BATCHES):
            if (ours := self.step(OURS, context, batch)) is not None:
                floor = self.decode_floor_ms(context, batch)
                yield Line(f"decode step, bf16, batch {batch}, context {context}", ours, "ms",
                           VLLM, self.step(VLLM, context, batch), floor, LEAST_SPEED[VLLM])  # fmt: skip

    def floor_lines(self) -> Iterator[Line]:
        yield Line("the core reads memory at", self.read_bytes_per_s / 1e9, "GB/s")
        yield Line("the core multiplies bf16 matrices at", self.flop_per_s / 1e9, "GFLOP/s")

    def _tokens_per_s(self, name: str, tokens: int) -> float | None:
        times = self.prefill_ms.get((name, tokens))
        return tokens / statistics.median(times) * 1e3 if times else None

    def quantized_lines(self) -> Iterator[Line]:
        """Each weight format beside bfloat16. The fastest one at batch 1 has to reach llama.cpp's speed."""
        names = {weights: f"{OURS} {weights}" for weights in FORMATS}
        alone = {
            weights: ours
            for weights, name in names.items()
            if (ours := self.step(name, QUANTIZED_CONTEXT, 1)) is not None
        }
        for weights, ours in alone.items():
            goal = LEAST_SPEED[LLAMA] if ours == min(alone.values()) else None
            yield Line(f"decode step, {weights}, batch 1, context {QUANTIZED_CONTEXT}, beside Q4_1", ours, "ms",
                       f"{LLAMA} Q4_1", self.step(LLAMA, QUANTIZED_CONTEXT, 1), least_ratio=goal)  # fmt: skip
        for weights in alone:
            for batch in reversed(BATCHES):
                if (ours := self.step(names[weights], QUANTIZED_CONTEXT, batch)) is not None:
                    plain = self.step(PLAIN, QUANTIZED_CONTEXT, batch)
                    yield Line(f"decode step, {weights}, batch {batch}, context {QUANTIZED_CONTEXT}, beside bf16",
                               ours, "ms", PLAIN, plain, least_ratio=LEAST_SPEED[PLAIN])  # fmt: skip


def start_line(name: str, seconds: float) -> Line:
    """`seconds`: from the start of a program's process to its first token."""
    most = MOST_START_S if name == PLAIN else None
    return Line(f"start of the engine's process to its first token, {name}", seconds, "s", most=most)
