"""The Llama family's forward pass over a flat batch of tokens.

    T tokens of the step    Hq query heads    Hkv KV heads    D head size

The rows of a step are the tokens of all its chunks in order; only attention separates the sequences. The forward pass
names no kernel: a `LinearMethod` prepares the matrices, the attention backend reads and writes the cache, and `Ops`
computes the rest. `Model.prepare` makes everything that needs no token of the step before. It may run on another thread
while `Model.forward` computes the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from core.step import ScheduledChunk
from engine.attention import AttentionBackend, StepAttention
from engine.batch import Batch
from engine.linear import LinearMethod
from engine.model_weights import LayerWeights, ModelWeights
from engine.ops import Ops
from engine.rotary import RotaryTable


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


@dataclass(frozen=True, slots=True)
class ModelInputs:
    token_ids: np.ndarray  # int64 [T]; 0 for the promised tokens
    promised_rows: np.ndarray  # int64: the rows of the promised tokens, in order
    sampling_rows: list[int]  # the rows whose logits are wanted
    attention: StepAttention


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
        max_positions: int,
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
        frequencies = torch.tensor(self.config.inverse_frequencies(), dtype=torch.float32, device=self.device)
        self.rotary_table = RotaryTable(frequencies, max_positions)

    def prepare(self, chunks: Sequence[ScheduledChunk]) -> ModelInputs:
        batch = Batch.of(chunks)
        token_ids: list[int] = []
        sampling_rows: list[int] = []
        for view, start, num_tokens, samples, promised in chunks:
            token_ids += (0,) if promised else view.token_ids[start : start + num_tokens]
            if samples:
                sampling_rows.append(len(token_ids) - 1)
        return ModelInputs(
            token_ids=np.array(token_ids, np.int64),
            promised_rows=batch.first_row[[chunk.promised for chunk in chunks]],
            sampling_rows=sampling_rows,
            attention=self.attention.begin_step(batch, self.rotary_table.rows(batch.positions)),
        )

    def forward(self, inputs: ModelInputs, promised: Sequence[int] = ()) -> torch.Tensor:
        """Compute every token of the step. `promised` has the promised tokens, in order.

        Returns the logits of the chunks that sample, in order. # -> float32 [number of chunks that sample, vocab]
        """
        token_ids, sampling_rows, step = inputs.token_ids, inputs.sampling_rows, inputs.attention
        token_ids[inputs.promised_rows] = promised
        hidden = self.embed(torch.from_numpy(token_ids).to(self.device))
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
