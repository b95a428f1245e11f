"""What was measured of the engine, and what follows from it: floors, speeds beside the peers, goals.

The floor of a step is the longer of two times: to read the weights once and the batch's KV once at the core's measured
read bandwidth, and to multiply at its measured speed of a matrix product.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.report import Line
from engine.model_weights import allocate_weights
from model_files.model_config import ModelConfig

OURS, PLAIN, VLLM, LLAMA = "Tandem", "Tandem bfloat16", "vLLM", "llama.cpp"
BATCHES, CONTEXTS, PROMPTS = (32, 8, 1), (512, 2048), (512, 1024, 1900)
QUANTIZED_CONTEXT = 512
LEAST_SPEED = {VLLM: 1.25, LLAMA: 1.0, PLAIN: 1.0}  # times the peer's
LEAST_ATTENTION_SHARE = 0.6  # of the core's read bandwidth
MOST_AROUND_SHARE = 0.05  # of a step of the largest batch
MOST_START_S = 5.0
WEIGHT_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Cell:
    """One measure of ours beside a peer's and beside the floor, all in the same unit: ms, or tokens/s."""

    measure: str
    value: float
    unit: str
    peer: str
    theirs: float | None  # None: the peer is not here
    floor: float | None = None
    least_speed: float | None = None  # times the peer's

    @property
    def speed(self) -> float | None:
        """How many times the peer's speed."""
        return None if self.theirs is None else self._faster(self.value, self.theirs)

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor is None else self._faster(self.value, self.floor)

    @property
    def goal(self) -> str:
        return f"at least {self.least_speed:g} x {self.peer}'s speed" if self.least_speed is not None else ""

    @property
    def holds(self) -> bool | None:
        return None if self.speed is None or self.least_speed is None else self.speed >= self.least_speed

    def lines(self) -> Iterator[Line]:
        yield Line(self.measure, self.goal, self.value, self.unit, self.peer, self.speed, self.holds)
        if self.floor is not None:
            yield Line(f"{self.measure}: the floor", "", self.floor, self.unit, "the floor", self.share_of_floor)

    def _faster(self, ours: float, other: float) -> float:
        return other / ours if self.unit == "ms" else ours / other


@dataclass
class Figures:
    model: ModelConfig
    # Of each step of a (program, context, batch): "ms", those of its parts, and the "length" of its sequences.
    steps: dict[tuple[str, int, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    prefill_ms: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    serving_share: float | None = None  # around the model while a worker serves, of a step
    first_token_s: dict[str, float] = field(default_factory=dict)  # from the start of each program's process
    read_bytes_per_s: float = 0.0
    flop_per_s: float = 0.0
    kv_bytes_per_token: int = 0

    def take_floors(self, floors: dict[str, float], about: dict[str, Any]) -> None:
        """The best seen counts: a floor that something disturbed is none."""
        self.read_bytes_per_s = max(self.read_bytes_per_s, floors["read_bytes_per_s"])
        self.flop_per_s = max(self.flop_per_s, floors["flop_per_s"])
        self.kv_bytes_per_token = about["kv_bytes_per_token"]

    def step(self, name: str, context: int, batch: int, part: str = "ms") -> float | None:
        values = self.steps.get((name, context, batch, part))
        return statistics.median(values) if values else None

    # ---- floors

    def num_weights(self) -> tuple[int, int]:
        """(those that every token is multiplied by, those of the head)"""
        weights = allocate_weights(self.model, torch.bfloat16, torch.device("meta"))
        count = sum(math.prod(slot.shape) for slot in weights.slots().values())
        head = self.model.vocab_size * self.model.hidden_size
        return count - (head if self.model.tie_embeddings else 2 * head), head

    def decode_floor_ms(self, context: int, batch: int) -> float:
        num_weights = sum(self.num_weights())
        read = num_weights * WEIGHT_BYTES + batch * context * self.kv_bytes_per_token
        return 1e3 * max(read / self.read_bytes_per_s, 2 * num_weights * batch / self.flop_per_s)

    def prefill_floor_tokens_per_s(self, tokens: int) -> float:
        body, head = self.num_weights()
        # Each token attends to half of the prompt on average, by a product for the scores and one for the values.
        attention = 2 * self.model.num_layers * self.model.num_heads * self.model.head_dim * tokens**2
        return tokens / ((2 * body * tokens + 2 * head + attention) / self.flop_per_s)

    # ---- what follows

    def cells(self) -> Iterator[Cell]:
        for context in CONTEXTS:
            for batch in reversed(BATCHES):
                if (ours := self.step(OURS, context, batch)) is not None:
                    what = f"decode step, bf16, batch {batch}, context {context}"
                    theirs = self.step(VLLM, context, batch)
                    floor = self.decode_floor_ms(context, batch)
                    yield Cell(what, ours, "ms", VLLM, theirs, floor, LEAST_SPEED[VLLM])
        for tokens in PROMPTS:
            if times := self.prefill_ms.get((OURS, tokens)):
                vllm_times = self.prefill_ms.get((VLLM, tokens))
                theirs = tokens / statistics.median(vllm_times) * 1e3 if vllm_times else None
                floor = self.prefill_floor_tokens_per_s(tokens)
                ours = tokens / statistics.median(times) * 1e3
                what = f"prefill, bf16, {tokens} tokens"
                yield Cell(what, ours, "tokens/s", VLLM, theirs, floor, LEAST_SPEED[VLLM])
        yield from self._quantized_cells()

    def _quantized_cells(self) -> Iterator[Cell]:
        """Each weight format beside bfloat16, and at batch 1 beside llama.cpp, whose speed one of them has to reach."""
        formats = sorted({name for name, *_ in self.steps} - {OURS, PLAIN, VLLM, LLAMA}) or [PLAIN]
        llama = self.step(LLAMA, QUANTIZED_CONTEXT, 1)
        alone = {name: ours for name in formats if (ours := self.step(name, QUANTIZED_CONTEXT, 1)) is not None}
        for name, ours in alone.items():
            best = ours == min(alone.values())
            what = f"decode step, {_weights(name)}, batch 1, context {QUANTIZED_CONTEXT}, beside Q4_1"
            yield Cell(what, ours, "ms", LLAMA, llama, least_speed=LEAST_SPEED[LLAMA] if best else None)
        for name in sorted(alone.keys() - {PLAIN}):
            for batch in reversed(BATCHES):
                if (ours := self.step(name, QUANTIZED_CONTEXT, batch)) is not None:
                    what = f"decode step, {_weights(name)}, batch {batch}, context {QUANTIZED_CONTEXT}, beside bf16"
                    plain = self.step(PLAIN, QUANTIZED_CONTEXT, batch)
                    yield Cell(what, ours, "ms", PLAIN, plain, least_speed=LEAST_SPEED[PLAIN])

    def other_lines(self) -> Iterator[Line]:
        yield Line("the core reads memory at", "", self.read_bytes_per_s / 1e9, "GB/s")
        yield Line("the core multiplies bf16 matrices at", "", self.flop_per_s / 1e9, "GFLOP/s")
        for context in CONTEXTS:
            for batch in reversed(BATCHES):
                yield from self._attention(context, batch)
            yield from self._around(context, max(BATCHES))
        if self.serving_share is not None:
            yield _around_line(f"in a decode worker that serves {max(BATCHES)} streams", self.serving_share)
        for name, seconds in self.first_token_s.items():
            goal = f"under {MOST_START_S:g} s" if name == PLAIN else ""
            what = f"{name}: start of the engine's process, on one core, to its first token"
            yield Line(what, goal, seconds, "s", holds=seconds < MOST_START_S if goal else None)

    def _attention(self, context: int, batch: int) -> Iterator[Line]:
        milliseconds, length = (self.step(OURS, context, batch, part) for part in ("attention_ms", "length"))
        if milliseconds and length is not None:
            speed = batch * length * self.kv_bytes_per_token / milliseconds * 1e3
            share = speed / self.read_bytes_per_s
            goal = f"at least {LEAST_ATTENTION_SHARE:.0%} of the core's read bandwidth"
            yield Line(f"paged attention in the model, batch {batch}, context {context}", goal, speed / 1e9, "GB/s",
                       "the read bandwidth", share, share >= LEAST_ATTENTION_SHARE)  # fmt: skip

    def _around(self, context: int, batch: int) -> Iterator[Line]:
        step, emit, model = (self.step(OURS, context, batch, part) for part in ("ms", "emit_ms", "model_ms"))
        if step is not None and emit is not None and model is not None:
            share = (step + emit - model) / (step + emit)
            yield _around_line(f"in one thread, batch {batch}, context {context}", share)


def _around_line(where: str, share: float) -> Line:
    goal = f"under {MOST_AROUND_SHARE:.0%} of the step"
    return Line(f"around the model, {where}", goal, 100 * share, "% of the step", holds=share < MOST_AROUND_SHARE)


def _weights(name: str) -> str:
    return name.removeprefix(f"{OURS} ")
