"""The Llama family's forward pass over a flat batch of tokens.

    T tokens of the step    Hq query heads    Hkv KV heads    D head size

The rows of a step are the tokens of all its chunks in order; only attention separates the sequences. The forward pass
names no kernel: a `LinearMethod` prepares the matrices, the attention backend reads and writes the cache, and `Ops`
computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from core.step import ScheduledChunk
from engine.attention import AttentionBackend
from engine.linear import LinearMethod
from engine.model_weights import LayerWeights, ModelWeights
from engine.ops import Ops
from engine.rotary import Rotation


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
            counts = torch.tensor([self.config.num_heads, self.config.num_kv_heads], device=weights.qk_norm.device)
            self.qk_norm = weights.qk_norm.repeat_interleave(counts, dim=0)

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


class Model:
    """Computes steps with the prepared weights and an attention backend, which holds the pool.

    Removes the layers from `weights` one by one: a matrix that the linear method has copied is freed before the next.
    """

    def __init__(
        self,
        weights: ModelWeights,
        attention: AttentionBackend,
        linear_method: LinearMethod,
        ops: Ops,
    ) -> None:
        self.config = weights.config
        self.ops = ops
        self.attention = attention
        self.device = weights.embedding.device
        self.final_norm = weights.final_norm  # [hidden]
        self.embed = linear_method.prepare_embedding(weights.embedding)
        self.layers: list[_Layer] = []
        while weights.layers:
            self.layers.append(_Layer(weights.layers.pop(0), self, linear_method))
        self.head = linear_method.prepare_head(weights.head)
        self.inverse_frequencies = torch.tensor(
            self.config.inverse_frequencies(), dtype=torch.float32, device=self.device
        )

    def forward(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Compute every token of the step. Returns the logits of the chunks that sample, in order.

        # -> float32 [number of chunks that sample, vocab]
        """
        token_ids: list[int] = []
        positions: list[int] = []
        sampling_rows: list[int] = []
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.sequence.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                sampling_rows.append(len(token_ids) - 1)
        hidden = self.embed(torch.tensor(token_ids, device=self.device))
        step = self.attention.begin_step(chunks, Rotation.of(positions, self.inverse_frequencies))
        update, epsilon = None, self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            normed = self.ops.add_rms_norm(hidden, update, layer.input_norm, epsilon)
            attended = step.attend(layer.project(normed), index)
            if layer is self.layers[-1] and len(sampling_rows) < len(token_ids):
                # Only rows that sample need logits. The KV of all rows is written.
                hidden, attended = hidden[sampling_rows], attended[sampling_rows]
            update = layer.output(attended.flatten(1))
            normed = self.ops.add_rms_norm(hidden, update, layer.feed_forward_norm, epsilon)
            update = layer.feed_forward(normed)
        return self.head(self.ops.add_rms_norm(hidden, update, self.final_norm, epsilon))
