"""The time of a step (`core/cost/step_cost.py`) and of a transfer: a cost model in place of a model and a network card.

`H100_8B` is the fit of `simulator/calibration/public_points.py` to the 42 measured points of Llama-3.1-8B-Instruct on
one H100 with TensorRT-LLM that ai-dynamo/aiconfigurator has (Apache-2.0): batch 8 to 128, prompts of 1,024 to 4,096
tokens, outputs of 128 to 512. The median error of the fit is 2 %, the largest 7 %. Longer prompts are extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.cost.step_cost import StepCost
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The network between workers. One read at a time leaves an owner, and one enters a reader."""

    bytes_per_s: float
    latency_s: float  # before the first byte of a read


H100_8B = StepCost(step_s=6.44e-3, sequence_s=0.0, token_s=1.89e-5, pair_s=5.3e-10, context_s=4.98e-8)
RDMA_400G = LinkCost(bytes_per_s=40e9, latency_s=20e-6)  # 400 Gb/s, of which 80 % are reached


def layout_8b(block_size: int) -> KVLayout:
    """Llama-3.1-8B with KV in 16 bits: 128 KiB for each token."""
    return KVLayout("llama-3.1-8b", "bfloat16", 32, 8, block_size, 128)
