"""Attention over the paged KV pool: the interface, and the readable reference in plain torch.

    T tokens of the step    Hq query heads    Hkv KV heads    G = Hq / Hkv    D head size    S positions of context

The rows of a step are the tokens of its chunks in order. A chunk of several tokens attends causally to its own
sequence. Chunks of one token (decode) are batched in groups of similar context, so padding stays below half.
The reference gathers a sequence's blocks into one run before the products; a kernel that reads blocks in place avoids
this memory traffic. The reference views the pool as a table of rows. Torch copies single rows of a table, but would
copy a whole strided layer to make the layer contiguous:

    head row  (block, layer, key or value, head) -> [block_size * D]      unit of gathering
    slot row  (..., head, place in the block)    -> [D]                   unit of writing
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from core.step import ScheduledChunk
from engine.kv_pool import KVPool
from engine.rotary import Rotation


class AttentionBackend(Protocol):
    """Made once per model. `begin_step` prepares the part that all layers share; `attend` is called once per layer."""

    def begin_step(self, chunks: Sequence[ScheduledChunk], rotation: Rotation) -> StepAttention: ...


class StepAttention(Protocol):
    def attend(
        self,
        heads: torch.Tensor,  # [T, Hq + 2 * Hkv, D] queries, keys, values, not yet rotated; may be rotated in place
        layer: int,
    ) -> torch.Tensor:  # [T, Hq, D]
        """Rotate queries and keys, write keys and values into their slots, and attend causally.

        The next layer's call may overwrite the result.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One chunk of several tokens: rows [first_row, first_row + num_tokens)."""

    first_row: int
    num_tokens: int
    num_positions: int  # of context, including the chunk
    key_rows: torch.Tensor  # [Hkv * blocks] head rows of layer 0's keys
    mask: torch.Tensor | None  # [num_tokens, S] added to the scores; None if the chunk is the whole context


@dataclass(frozen=True, slots=True)
class _DecodePart:
    """Chunks of one token with similar context, computed as one batch of B."""

    rows: torch.Tensor  # [B]
    key_rows: torch.Tensor  # [Hkv * B * blocks] head rows of layer 0's keys, padded with each sequence's own block 0
    mask: torch.Tensor  # [B, 1, 1, S] added to the scores
    unseen: torch.Tensor  # [masked positions] of all B * S


class TorchAttention:
    """The reference backend, for a pool on any device."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.device = pool.tensor.device
        self.block_size = pool.layout.block_size
        self.num_kv_heads = pool.layout.num_kv_heads
        self.layer_rows = 2 * self.num_kv_heads  # head rows of one layer of one block
        self.block_rows = pool.layout.num_layers * self.layer_rows
        self.heads = torch.arange(self.num_kv_heads, device=self.device)

    def begin_step(self, chunks: Sequence[ScheduledChunk], rotation: Rotation) -> TorchStepAttention:
        slots: list[tuple[int, int]] = []  # (block, place in the block) of each row
        prefills: list[PrefillPart] = []
        decodes: dict[int, list[tuple[int, ScheduledChunk]]] = {}
        row = 0
        for chunk in chunks:
            positions = range(chunk.start, chunk.start + chunk.num_tokens)
            slots += [
                (chunk.sequence.block_table[place // self.block_size], place % self.block_size) for place in positions
            ]
            if chunk.num_tokens == 1:
                num_blocks = self._num_blocks(chunk)
                decodes.setdefault(num_blocks.bit_length(), []).append((row, chunk))
            else:
                prefills.append(self._prefill_part(row, chunk))
            row += chunk.num_tokens
        return TorchStepAttention(
            backend=self,
            rotation=rotation,
            key_slots=self._key_slots(slots),
            prefills=prefills,
            decodes=[self._decode_part(group) for group in decodes.values()],
        )

    def prefills_of(self, chunks: Sequence[ScheduledChunk]) -> list[PrefillPart]:
        """The chunks of several tokens, for a backend that uses torch for prefill only."""
        first_rows = itertools.accumulate((chunk.num_tokens for chunk in chunks), initial=0)
        return [
            self._prefill_part(row, chunk)
            for row, chunk in zip(first_rows, chunks, strict=False)
            if chunk.num_tokens > 1
        ]

    def attend_prefill(
        self, part: PrefillPart, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """One chunk's attention. The chunk's keys and values are already in the pool.

        # query [T, Hq, D], key and value [T, Hkv, D], all rotated, of the whole step -> [num_tokens, Hq, D]
        """
        rows = slice(part.first_row, part.first_row + part.num_tokens)
        if part.mask is None:
            keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
        else:
            keys, values = self.gather(part.key_rows, layer)
        return _attend_prefill(part, query[rows], keys, values)

    def gather(self, key_rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, each as one run. # [Hkv, blocks * block_size, D] twice"""
        head_dim = self.pool.layout.head_dim
        table = self.pool.tensor.view(-1, self.block_size * head_dim)
        key_rows = key_rows + layer * self.layer_rows
        shape = (self.num_kv_heads, -1, head_dim)
        keys = table.index_select(0, key_rows).view(shape)
        return keys, table.index_select(0, key_rows + self.num_kv_heads).view(shape)

    def _key_slots(self, slots: list[tuple[int, int]]) -> torch.Tensor:
        """Slot rows of layer 0's keys. # [T * Hkv]"""
        blocks, offsets = torch.tensor(slots, device=self.device).unbind(1)
        head_rows = blocks[:, None] * self.block_rows + self.heads[None, :]
        return (head_rows * self.block_size + offsets[:, None]).flatten()

    def _key_rows(self, blocks: list[int]) -> torch.Tensor:
        """Head rows of layer 0's keys, in an order that gathers to [Hkv, blocks * block_size, D]."""
        table = torch.tensor(blocks, device=self.device)
        return (table[None, :] * self.block_rows + self.heads[:, None]).flatten()

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        """An additive mask: 0 if seen, else -infinity. Made once per step; torch converts a bool mask per layer."""
        return torch.zeros_like(seen, dtype=self.pool.tensor.dtype).masked_fill_(~seen, float("-inf"))

    def _num_blocks(self, chunk: ScheduledChunk) -> int:
        return -(-(chunk.start + chunk.num_tokens) // self.block_size)

    def _prefill_part(self, first_row: int, chunk: ScheduledChunk) -> PrefillPart:
        num_positions = chunk.start + chunk.num_tokens
        mask = None
        if chunk.start > 0:
            positions = torch.arange(num_positions, device=self.device)
            mask = self._additive(positions[None, :] <= positions[chunk.start :, None])
        key_rows = self._key_rows(list(chunk.sequence.block_table[: self._num_blocks(chunk)]))
        return PrefillPart(first_row, chunk.num_tokens, num_positions, key_rows, mask)

    def _decode_part(self, group: list[tuple[int, ScheduledChunk]]) -> _DecodePart:
        width = max(self._num_blocks(chunk) for _, chunk in group)
        table: list[int] = []
        for _, chunk in group:
            blocks = list(chunk.sequence.block_table[: self._num_blocks(chunk)])
            table += blocks + blocks[:1] * (width - len(blocks))
        lengths = torch.tensor([chunk.start + 1 for _, chunk in group], device=self.device)
        seen = torch.arange(width * self.block_size, device=self.device)[None, :] < lengths[:, None]
        return _DecodePart(
            rows=torch.tensor([row for row, _ in group], device=self.device),
            key_rows=self._key_rows(table),
            mask=self._additive(seen)[:, None, None, :],
            unseen=seen.flatten().logical_not().nonzero().flatten(),
        )


class TorchStepAttention:
    """One step's rows, computed once for all layers."""

    def __init__(
        self,
        backend: TorchAttention,
        rotation: Rotation,
        key_slots: torch.Tensor,  # [T * Hkv]
        prefills: list[PrefillPart],
        decodes: list[_DecodePart],
    ) -> None:
        self.backend = backend
        self.rotation = rotation
        self.key_slots = key_slots
        self.prefills = prefills
        self.decodes = decodes

    def attend(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        backend, head_dim = self.backend, heads.shape[-1]
        num_rotated = heads.shape[1] - backend.num_kv_heads
        rotated, value = self.rotation(heads[:, :num_rotated]), heads[:, num_rotated:]
        query, key = rotated[:, : -backend.num_kv_heads], rotated[:, -backend.num_kv_heads :]
        slot_table = backend.pool.tensor.view(-1, head_dim)
        key_slots = self.key_slots + layer * backend.layer_rows * backend.block_size
        value_slots = key_slots + backend.num_kv_heads * backend.block_size
        slot_table.index_copy_(0, key_slots, key.reshape(-1, head_dim))
        slot_table.index_copy_(0, value_slots, value.reshape(-1, head_dim))
        attended = query.new_empty(query.shape)
        for part in self.prefills:
            rows = slice(part.first_row, part.first_row + part.num_tokens)
            attended[rows] = backend.attend_prefill(part, query, key, value, layer)
        for decode in self.decodes:
            keys, values = backend.gather(decode.key_rows, layer)
            attended[decode.rows] = _attend_decode(decode, query[decode.rows], keys, values)
        return attended


def _attend_prefill(part: PrefillPart, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """# query [n, Hq, D] -> [n, Hq, D]"""
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None, :, : part.num_positions],
        values[None, :, : part.num_positions],
        attn_mask=part.mask,
        is_causal=part.mask is None,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_decode(part: _DecodePart, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """# query [B, Hq, D] -> [B, Hq, D]; the G query heads of a KV head replace the query tokens of a prefill"""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    # A mask does not hide NaN, and an earlier sequence may have left NaN in a slot.
    keys.index_fill_(1, part.unseen, 0.0)
    values.index_fill_(1, part.unseen, 0.0)
    by_sequence = (num_kv_heads, batch, -1, head_dim)
    attended = F.scaled_dot_product_attention(
        query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim),
        keys.view(by_sequence).transpose(0, 1),
        values.view(by_sequence).transpose(0, 1),
        attn_mask=part.mask,
    )
    return attended.reshape(batch, num_heads, head_dim)
