"""The cost of a step by the sizes of the model: floating-point operations, and bytes of memory.

    FLOP  = 2 x weights x tokens + 4 x layers x heads x head size x (decode context + attended pairs)
    bytes = weights, read once + KV of every token that is attended to or computed

A multiplication and an addition count as two. A step computes the logits of few prompt tokens, so the output matrix
counts for sequences in decode only. Activations stay in the caches and are not counted. The KV of a prompt chunk is
counted once for the chunk: its tokens attend to it together.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.cost.step_cost import StepWork


@dataclass(frozen=True, slots=True)
class ModelSizes:
    num_layer_weights: int  # in the matrices of all layers
    num_head_weights: int  # in the output matrix
    weight_bytes: float  # of one weight
    pair_flop: float  # of a token that attends to a token, in all layers
    kv_bytes: float  # of the KV of a token, in all layers

    def flop(self, work: StepWork) -> float:
        tokens = work.num_decodes + work.prefill_tokens
        matrices = self.num_layer_weights * tokens + self.num_head_weights * work.num_decodes
        return 2.0 * matrices + self.pair_flop * (work.decode_context + work.attended_pairs)

    def memory_bytes(self, work: StepWork) -> float:
        """Of a prompt chunk, `attended_pairs / prefill_tokens` is the mean number of tokens that it attends to."""
        weights = (self.num_layer_weights + self.num_head_weights) * self.weight_bytes
        chunk_context = work.attended_pairs / work.prefill_tokens if work.prefill_tokens else 0.0
        written = work.num_decodes + work.prefill_tokens
        return weights + self.kv_bytes * (work.decode_context + chunk_context + written)


@dataclass(frozen=True, slots=True)
class Peak:
    """The limits of a worker's hardware; 0 = not known."""

    flop_per_s: float = 0.0
    bytes_per_s: float = 0.0
