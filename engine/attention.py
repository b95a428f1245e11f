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

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.block_tables import BlockTables, StepTables
from engine.kv_pool import KVPool
from engine.rotary import Rotation


class AttentionBackend(Protocol):
    """Made once per model. `begin_step` prepares the part that all layers share; `attend` is called once per layer.

    `begin_step` may be called while the layers of the step before are computed on another thread. At most two steps are
    begun and not computed. On a CPU, `begin_step` computes with numpy, and so starts no compute threads.
    """

    def begin_step(self, batch: Batch, rotation: Rotation) -> StepAttention: ...


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
class _PrefillPart:
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
        self.heads = np.arange(self.num_kv_heads)
        self.block_tables = BlockTables(pool.num_blocks, self.block_size)
        # numpy has no bfloat16, so masks are made of the bits of -infinity.
        bits = {2: torch.int16, 4: torch.int32}[pool.tensor.element_size()]
        self.infinity_bits = torch.tensor(float("-inf"), dtype=pool.tensor.dtype).view(bits).numpy()

    def begin_step(self, batch: Batch, rotation: Rotation) -> TorchStepAttention:
        tables = self.block_tables.begin_step(batch)
        blocks, places = tables.block_of_each_token(batch, self.block_size), batch.positions % self.block_size
        head_rows = blocks[:, None] * self.block_rows + self.heads
        return TorchStepAttention(
            backend=self,
            rotation=rotation,
            key_slots=self._on_device((head_rows * self.block_size + places[:, None]).ravel()),
            prefills=[self._prefill_part(batch, tables, int(i)) for i in np.flatnonzero(batch.num_tokens > 1)],
            decodes=[self._decode_part(batch, tables, group) for group in _groups_of_decodes(batch, tables)],
        )

    def attend_prefill(
        self, part: _PrefillPart, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int
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

    def _prefill_part(self, batch: Batch, tables: StepTables, chunk: int) -> _PrefillPart:
        start, num_tokens = int(batch.start[chunk]), int(batch.num_tokens[chunk])
        end, mask = start + num_tokens, None
        if start > 0:
            mask = self._additive(_places_from(np.arange(start + 1, end + 1), end), (num_tokens, end))
        key_rows = self._key_rows(tables.table[tables.rows[chunk], : tables.num_blocks[chunk]])
        return _PrefillPart(int(batch.first_row[chunk]), num_tokens, end, key_rows, mask)

    def _decode_part(self, batch: Batch, tables: StepTables, group: np.ndarray) -> _DecodePart:
        width = int(tables.num_blocks[group].max())
        num_positions = width * self.block_size
        unseen = _places_from(batch.start[group] + 1, num_positions)
        return _DecodePart(
            rows=self._on_device(batch.first_row[group].astype(np.int64)),
            key_rows=self._key_rows(tables.table[tables.rows[group], :width]),
            mask=self._additive(unseen, (len(group), 1, 1, num_positions)),
            unseen=self._on_device(unseen),
        )

    def _key_rows(self, blocks: np.ndarray) -> torch.Tensor:
        """Head rows of layer 0's keys, in an order that gathers to [Hkv, blocks * block_size, D]."""
        first_rows = blocks.ravel().astype(np.int64) * self.block_rows
        return self._on_device((first_rows + self.heads[:, None]).ravel())

    def _additive(self, unseen: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
        """An additive mask: -infinity in the unseen places, else 0. Torch converts a bool mask in every layer."""
        bits = np.zeros(shape, self.infinity_bits.dtype)
        bits.ravel()[unseen] = self.infinity_bits
        return self._on_device(bits).view(self.pool.tensor.dtype)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _groups_of_decodes(batch: Batch, tables: StepTables) -> list[np.ndarray]:
    """The chunks of one token, in groups of similar context: the numbers of blocks have the same bit length."""
    decodes = np.flatnonzero(batch.num_tokens == 1)
    bit_lengths = np.frexp(tables.num_blocks[decodes])[1]
    return [decodes[bit_lengths == length] for length in np.unique(bit_lengths)]


def _places_from(first: np.ndarray, width: int) -> np.ndarray:
    """The places [first[i], width) of every row i, in an array of rows that is `width` wide. # int64"""
    counts = width - first.astype(np.int64)
    ends = np.cumsum(counts)  # of the rows' runs in the result
    row_ends = np.arange(1, len(first) + 1) * width
    return np.arange(ends[-1]) + np.repeat(row_ends - ends, counts)


class TorchStepAttention:
    """One step's rows, computed once for all layers."""

    def __init__(
        self,
        backend: TorchAttention,
        rotation: Rotation,
        key_slots: torch.Tensor,  # [T * Hkv]
        prefills: list[_PrefillPart],
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


def _attend_prefill(part: _PrefillPart, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
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
