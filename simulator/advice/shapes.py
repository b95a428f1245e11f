"""What can be built from a number of GPUs: undivided workers, or a prefill and a decode pool, of several widths.

A width is the number of GPUs of one worker (tensor parallelism). The undivided rival of a split may be wider, and may
have a smaller token budget, which protects its decodes from long prompts: both are free to whoever does not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from core.cost.step_cost import StepCost
from simulator.advice.pools import MAX_RUNNING, Fleet, Handoff, Job, Worker, WorkerKind
from simulator.calibration.calibration import MEAN_DELAY, NUM_MESSAGES
from simulator.calibration.costs import Costs

BUDGETS = (512, 2048, 8192)  # tokens of a step that undivided workers try
MAX_CHUNKS = 256  # of the mean prompt; a smaller budget is not tried
NUM_NEAR = 3  # splits of each pair of widths: those whose pools are best balanced
MIN_MODEL_ERROR, UNKNOWN_MODEL_ERROR = 0.10, 0.20  # of a time, as a share


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_decode` is 0 for undivided workers."""

    num_first: int
    width: int
    max_step_tokens: int
    num_decode: int = 0
    decode_width: int = 1

    @property
    def is_split(self) -> bool:
        return self.num_decode > 0

    def __str__(self) -> str:
        if self.is_split:
            return f"{self.num_first}P{_of(self.width)} + {self.num_decode}D{_of(self.decode_width)}"
        return f"{self.num_first} undivided{_of(self.width)}, {self.max_step_tokens:,} tokens a step"


def _of(width: int) -> str:
    return f" of {width} GPUs" if width > 1 else ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way in which the model may be wrong. The numbers multiply what the costs say."""

    name: str
    overlap: float = 0.0  # see `WorkerKind`
    prompt: float = 0.0  # +1: prompts take longer by the error of the costs; -1: less long
    decode: float = 0.0
    wide: float = 0.0  # likewise, of workers of several GPUs
    link: float = 1.0
    hits: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a worker of each width."""

    widths: Mapping[int, Costs]
    pool_tokens: int  # KV of one GPU
    scaled_like: str = ""  # the costs that tell how wider workers differ from the measured one; empty: all measured

    def error(self, width: int) -> float:
        median = self.widths[width].median_error
        return UNKNOWN_MODEL_ERROR if median is None else max(MIN_MODEL_ERROR, 2.0 * median)

    def cost(self, width: int, scenario: Scenario, *, is_decode: bool) -> StepCost:
        costs, error = self.widths[width], self.error(width)
        cost = costs.decode if is_decode else costs.prefill
        wide = 1.0 + scenario.wide * error if width > min(self.widths) else 1.0
        prompt, decode = wide * (1.0 + scenario.prompt * error), wide * (1.0 + scenario.decode * error)
        return StepCost(
            step_s=cost.step_s * (decode if is_decode else wide),
            sequence_s=costs.decode.sequence_s * decode,
            context_s=costs.decode.context_s * decode,
            token_s=costs.prefill.token_s * prompt,
            pair_s=costs.prefill.pair_s * prompt,
        )

    def fleet(self, shape: Shape, scenario: Scenario) -> Fleet:
        costs = self.widths[shape.width]
        first = self._kind(shape.width, shape.max_step_tokens, scenario, is_decode=not shape.is_split)
        decode = [
            Worker(self._kind(shape.decode_width, shape.max_step_tokens, scenario, is_decode=True))
            for _ in range(shape.num_decode)
        ]
        narrowest = min(self.widths)
        link = self.widths[narrowest].link
        handoff = Handoff(link.bytes_per_s * scenario.link / narrowest, link.latency_s, costs.token_bytes)
        outside_s = NUM_MESSAGES * MEAN_DELAY * costs.message_delay_s
        return Fleet([Worker(first) for _ in range(shape.num_first)], decode, handoff, outside_s)

    def _kind(self, width: int, max_step_tokens: int, scenario: Scenario, *, is_decode: bool) -> WorkerKind:
        cost = self.cost(width, scenario, is_decode=is_decode)
        return WorkerKind(width, cost, max_step_tokens, width * self.pool_tokens, scenario.overlap)

    # ---- what a pool carries at most

    def prompt_rate(self, width: int, mean: Job) -> float:
        """Requests/s of one worker that only computes prompts."""
        new_tokens = mean.num_prompt_tokens - mean.num_cached_tokens
        return 1.0 / self.widths[width].prefill.prompt_seconds(new_tokens, mean.num_cached_tokens)

    def decode_rate(self, width: int, mean: Job, slo_tpot_s: float) -> float:
        """Requests/s of one worker that only decodes, with gaps of `slo_tpot_s`."""
        cost, tokens = self.widths[width].decode, mean.num_prompt_tokens + mean.num_output_tokens / 2
        most = min(MAX_RUNNING, width * self.pool_tokens / tokens)
        each_s = cost.sequence_s + tokens * cost.context_s
        running = max(1.0, min(most, (slo_tpot_s - cost.step_s) / each_s))
        gap_s = cost.step_s + running * each_s  # a pool that cannot fill the gap runs faster
        return running / (gap_s * max(1, mean.num_output_tokens - 1))


def undivided_shapes(num_gpus: int, model: CostModel, mean: Job) -> Iterator[Shape]:
    for width, costs in model.widths.items():
        if num_gpus % width == 0:
            most, least = costs.max_step_tokens, mean.num_prompt_tokens / MAX_CHUNKS
            for budget in sorted({most, *(budget for budget in BUDGETS if least <= budget < most)}):
                yield Shape(num_gpus // width, width, budget)


def split_shapes(num_gpus: int, model: CostModel, mean: Job, slo_tpot_s: float) -> Iterator[Shape]:
    """Of each pair of widths, the splits of all GPUs that the slower pool limits least."""
    for width, costs in model.widths.items():
        for decode_width in model.widths:
            found = [
                Shape(num_first, width, costs.max_step_tokens, left // decode_width, decode_width)
                for num_first in range(1, num_gpus // width + 1)
                if (left := num_gpus - num_first * width) and left % decode_width == 0
            ]
            found.sort(key=lambda shape: -highest_rate(shape, model, mean, slo_tpot_s))
            yield from found[:NUM_NEAR]


def highest_rate(shape: Shape, model: CostModel, mean: Job, slo_tpot_s: float) -> float:
    """Requests/s that the shape cannot exceed with requests of these mean lengths, about."""
    prompts = model.prompt_rate(shape.width, mean) * shape.num_first
    if shape.is_split:
        return min(prompts, model.decode_rate(shape.decode_width, mean, slo_tpot_s) * shape.num_decode)
    decodes = model.decode_rate(shape.width, mean, slo_tpot_s) * shape.num_first
    return 1.0 / (1.0 / prompts + 1.0 / decodes)


def scaled_widths(costs: Costs, likes: Mapping[int, Costs]) -> dict[int, Costs]:
    """`costs` of one GPU, and wider workers that gain from more GPUs as those of another model do."""
    one = likes[1]

    def like(cost: StepCost, wide: StepCost, base: StepCost) -> StepCost:
        step, token, context = wide.step_s / base.step_s, wide.token_s / base.token_s, wide.context_s / base.context_s
        return StepCost(cost.step_s * step, cost.sequence_s, cost.context_s * context, cost.token_s * token,
                        cost.pair_s * token)  # fmt: skip

    return {1: costs} | {
        width: replace(
            costs,
            prefill=like(costs.prefill, wide.prefill, one.prefill),
            decode=like(costs.decode, wide.decode, one.decode),
            median_error=max(UNKNOWN_MODEL_ERROR / 2, costs.median_error or 0.0),
        )
        for width, wide in likes.items()
        if width > 1
    }
