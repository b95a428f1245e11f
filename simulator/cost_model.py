"""The time of a step and of a transfer: a cost model in place of a model and a network card.

    step = step_s + prefill tokens x token_s + attended pairs x pair_s + decode context x context_s

A pair is one prefill token and one token before it. The decode context is the sum of the lengths of all sequences in
decode. `H100_8B` is the least-squares fit, in relative errors, to the 45 measured points of Llama-3.1-8B-Instruct on
one H100 with TensorRT-LLM in `silicon_sample.csv` (ai-dynamo/aiconfigurator, Apache-2.0): batch 8 to 128, prompts of
1,024 to 4,096 tokens, outputs of 128 to 512. Such a point is the mean gap between tokens, in which each sequence of the
batch prefills one prompt per output: gap = step_s + batch x (context x context_s + prefill of one prompt / output).
The median error of the fit is 2 %, the largest 7 %. Longer prompts are extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kv_layout import KVLayout
from core.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepCost:
    step_s: float  # of any step: the weights are read once
    token_s: float
    pair_s: float
    context_s: float

    def seconds(self, plan: StepPlan) -> float:
        total = self.step_s
        for chunk in plan.chunks:
            total += self._decode(chunk.start) if chunk.num_tokens == 1 else self._chunk(chunk.start, chunk.num_tokens)
        return total

    def prefill_seconds(self, num_tokens: int) -> float:
        """Seconds to compute a whole prompt, without `step_s`, which prompts of one step share."""
        return self._chunk(0, num_tokens)

    def _decode(self, num_computed: int) -> float:
        return (num_computed + 1) * self.context_s

    def _chunk(self, start: int, num_tokens: int) -> float:
        return num_tokens * self.token_s + num_tokens * (start + num_tokens / 2) * self.pair_s


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The network between workers. One read at a time leaves an owner, and one enters a reader."""

    bytes_per_s: float
    latency_s: float  # before the first byte of a read


H100_8B = StepCost(step_s=6.44e-3, token_s=1.89e-5, pair_s=5.3e-10, context_s=4.98e-8)
RDMA_400G = LinkCost(bytes_per_s=40e9, latency_s=20e-6)  # 400 Gb/s, of which 80 % are reached


def layout_8b(block_size: int) -> KVLayout:
    """Llama-3.1-8B with KV in 16 bits: 128 KiB for each token."""
    return KVLayout("llama-3.1-8b", "bfloat16", 32, 8, block_size, 128)
