"""The Llama family's forward pass over a flat batch of tokens: tensors in, tensors out.

    T tokens of the step    S rows that sample    Hq query heads    Hkv KV heads    D head size

The rows of a step are the tokens of all its chunks in order; only attention separates the sequences. The forward pass
names no kernel: a `LinearMethod` prepares the matrices, the attention backend reads and writes the cache, and `Ops`
computes the rest. `Model.compute` reads no tensor back to the host, so it can be captured in a CUDA graph.
`engine/step_inputs.py` makes the inputs from the chunks of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import StepAttention
from engine.linear import LinearMethod
from engine.model_weights import LayerWeights, ModelWeights
from engine.ops import Ops


class _Layer:
    def __init__(self, weights: LayerWeights, model: Model, linear_method: LinearMethod) -> None:
        self.config = model.config
        self.ops = model.ops
        self.input_norm = weights.input_norm  # [hidden]
        self.feed_forward_norm = weights.feed_forward_norm  # [hidden]
        self.qkv = linear_method.prepare(weights.qkv, weights.qkv_bias)
        self.output = linear_method.prepare(weights.output, weights.output_bias)
        self.gate_up = linear_method.prepare_gated(weights.gate_up)
        self.down = linear_method.prepare(weights.down, None)
        self.qk_norm: torch.Tensor | None = None  # [Hq + Hkv, D]
        if weights.qk_norm is not None:
            counts = (self.config.num_heads, self.config.num_kv_heads)
            self.qk_norm = torch.cat(
                [row.expand(count, -1) for row, count in zip(weights.qk_norm, counts, strict=True)]
            )

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """The query, key and value heads of each row. # [T, hidden] -> [T, Hq + 2 * Hkv, D]"""
        config = self.config
        num_normed = config.num_heads + config.num_kv_heads
        heads = self.qkv(normed).view(-1, num_normed + config.num_kv_heads, config.head_dim)
        if self.qk_norm is not None:
            queries_and_keys = heads[:, :num_normed]
            scaled = F.rms_norm(queries_and_keys, queries_and_keys.shape[-1:], None, config.rms_norm_eps)
            queries_and_keys.copy_(scaled * self.qk_norm)
        return heads

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(normed))


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Tensors on the device of the model."""

    token_ids: torch.Tensor  # int32 or int64 [T]
    sampling_rows: torch.Tensor | None  # int64 [S] the rows whose logits are wanted; None: all rows
    attention: StepAttention


class Model:
    """The prepared weights.

    Removes the layers from `weights` one by one: a matrix that the linear method has copied is freed before the next.
    """

    def __init__(self, weights: ModelWeights, linear_method: LinearMethod, ops: Ops) -> None:
        self.config = weights.config
        self.ops = ops
        self.device = weights.embedding.device
        self.final_norm = weights.final_norm  # [hidden]
        self.embed = linear_method.prepare_embedding(weights.embedding)
        self.layers: list[_Layer] = []
        while weights.layers:
            self.layers.append(_Layer(weights.layers.pop(0), self, linear_method))
        self.head = linear_method.prepare_head(weights.head)

    def compute(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute every token of the step, and write its KV.

        Returns the logits of the rows that sample, in order. # -> float32 [S, vocab]
        """
        sampling_rows, step = inputs.sampling_rows, inputs.attention
        hidden = self.embed(inputs.token_ids)
        update, epsilon = None, self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            normed = self.ops.add_rms_norm(hidden, update, layer.input_norm, epsilon)
            attended = step.attend(layer.project(normed), index)
            if layer is self.layers[-1] and sampling_rows is not None:
                # Only rows that sample need logits. The KV of all rows is written.
                hidden, attended = hidden.index_select(0, sampling_rows), attended.index_select(0, sampling_rows)
            update = layer.output(attended.flatten(1))
            normed = self.ops.add_rms_norm(hidden, update, layer.feed_forward_norm, epsilon)
            update = layer.feed_forward(normed)
        return self.head(self.ops.add_rms_norm(hidden, update, self.final_norm, epsilon))
