"""The host's half of sampling on a device: what each row of a step's logits needs, in one upload.

    S rows of logits    A rows whose logits change (bias, penalties, min_tokens)    D rows that draw
    L rows with log-probabilities    E entries: the tokens of the A rows whose logits change

A penalty needs the counts of a sequence's tokens (engine/histories.py). A promised token is not known here, so the
device adds that token: `AdjustedRows.promised` tells where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from core.request import draw_key
from core.step import ScheduledChunk
from engine.gpu.device_queue import DeviceQueue, Mark
from engine.histories import NOT_SEEN, Histories
from engine.sampling import barred_tokens, has_penalties, is_plain

NO_ROWS: Mapping[str, int] = MappingProxyType({})
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows with top_k come first."""

    num_listed: int  # rows with top_k
    list_size: int  # the highest logits that each of these rows has listed
    rows: torch.Tensor  # int32 [D]
    top_k: torch.Tensor  # int32 [D]; 0 = all
    settings: torch.Tensor  # float64 [D, 3] temperature, top_p, min_p
    keys: torch.Tensor  # int64 [D] the 64 bits of `draw_key`


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Entries of row i are [first_entry[i], first_entry[i + 1]). The first entries of a row have a bias."""

    rows: torch.Tensor  # int32 [A]
    first_entry: torch.Tensor  # int32 [A + 1]
    token_ids: torch.Tensor  # int32 [E], distinct in a row
    counts: torch.Tensor  # int32 [E] in the output; 0: in the prompt alone; NOT_SEEN: in neither
    first_bias: torch.Tensor  # int32 [A + 1]
    biases: torch.Tensor  # float64 [first_bias[A]]; -inf bars the token
    penalties: torch.Tensor  # float64 [A, 3] repetition, presence, frequency
    promised: torch.Tensor  # int32 [A] row of the sequence's last token among the rows of the step before; -1: known


class MaskedRow(NamedTuple):
    """A row whose output has a grammar. Its mask comes with the tokens of the step before."""

    row: int
    chunk: ScheduledChunk
    barred: Sequence[int]  # tokens that end the output, before min_tokens


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """`row_of` has the row of each sequence that samples, in the order of the rows."""

    row_of: Mapping[str, int]
    all_drawn: bool
    drawn: DrawnRows | None
    adjusted: AdjustedRows | None
    logprob_rows: torch.Tensor | None  # int32 [L]
    num_logprobs: Sequence[int]  # [L] most likely tokens of each of these rows
    logprob_names: Sequence[str]  # [L]
    reads_promised: bool  # whether a penalty counts a promised token
    grammar_rows: Sequence[MaskedRow] = ()  # the rows whose outputs have a grammar
    uploaded: Mark | None = None  # the tensors are on the device from here on

    @property
    def num_rows(self) -> int:
        return len(self.row_of)

    @property
    def memory(self) -> torch.Tensor | None:
        """A tensor in the memory that all tensors of the plan share."""
        if self.logprob_rows is not None:
            return self.logprob_rows
        part = self.drawn or self.adjusted
        return None if part is None else part.rows


class Planner:
    """Makes the plans of a sampler. Calls must not overlap."""

    def __init__(self, queue: DeviceQueue, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._queue = queue
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._histories = Histories()

    def plan(self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int]) -> SamplingPlan:
        """`rows_before` has the rows of the step before. Raises `KeyError` if it lacks a promised sequence."""
        chunks = [chunk for chunk in chunks if chunk.samples]
        arrays: dict[str, np.ndarray] = {}
        drawn = [row for row, chunk in enumerate(chunks) if not chunk.sequence.sampling.greedy]
        top_ks = {row: top_k for row in drawn if 0 < (top_k := chunks[row].sequence.sampling.top_k) < self._vocab_size}
        drawn.sort(key=lambda row: row not in top_ks)
        if drawn:
            arrays |= _drawn(chunks, drawn, top_ks)
        entries = [
            (row, *self._entries(chunk))
            for row, chunk in enumerate(chunks)
            if chunk.sequence.sampling.min_tokens or not is_plain(chunk.sequence.sampling)
        ]
        entries = [entry for entry in entries if len(entry[1]) or not is_plain(chunks[entry[0]].sequence.sampling)]
        if entries:
            arrays |= _adjusted(chunks, entries, rows_before)
        asked = [row for row, chunk in enumerate(chunks) if chunk.sequence.sampling.num_logprobs is not None]
        if asked:
            arrays["logprob_rows"] = np.array(asked, np.int32)
        tensors, uploaded = self._upload(arrays)
        return SamplingPlan(
            row_of={chunk.sequence.sequence_id: row for row, chunk in enumerate(chunks)},
            all_drawn=len(drawn) == len(chunks),
            drawn=DrawnRows(len(top_ks), self._list_size(top_ks.values()), **_part("drawn", tensors))
            if drawn
            else None,
            adjusted=AdjustedRows(**_part("adjusted", tensors)) if entries else None,
            logprob_rows=tensors.get("logprob_rows"),
            num_logprobs=[chunks[row].sequence.sampling.num_logprobs or 0 for row in asked],
            logprob_names=[chunks[row].sequence.sequence_id for row in asked],
            reads_promised=any(chunks[entry[0]].promised for entry in entries),
            grammar_rows=[
                MaskedRow(row, chunk, barred_tokens(chunk, self._eos_token_ids))
                for row, chunk in enumerate(chunks)
                if chunk.sequence.sampling.grammar
            ],
            uploaded=uploaded,
        )

    def _list_size(self, top_ks: Collection[int]) -> int:
        """With room for tokens that are as likely as the last one kept. Kernels read multiples of 16 faster."""
        return min(-(-2 * max(top_ks, default=0) // 16) * 16 + 16, self._vocab_size)

    def _entries(self, chunk: ScheduledChunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of a row whose logits change, their counts, and the biases of the first of these tokens."""
        sampling = chunk.sequence.sampling
        bars = sampling.min_tokens and not sampling.grammar  # else the mask of the row bars them, if it may
        barred = barred_tokens(chunk, self._eos_token_ids) if bars else []
        biased = dict(sampling.logit_bias)
        if not has_penalties(sampling):
            biased |= dict.fromkeys(barred, -np.inf)
            ids = np.array(list(biased), np.int32)
            return ids, np.full(len(ids), NOT_SEEN, np.int32), np.array(list(biased.values()), np.float64)
        # The history begins with every token that may ever have a bias, so the order stays as tokens are added.
        last = sampling.stop_tokens(self._eos_token_ids) if bars else ()
        first = [*biased, *(token_id for token_id in sorted(last) if token_id not in biased)]
        biased |= dict.fromkeys(barred, -np.inf)
        end = chunk.start if chunk.promised else chunk.start + chunk.num_tokens
        ids, counts = self._histories.counts(chunk.sequence, end, first)
        return ids, counts, np.array([biased.get(token_id, 0.0) for token_id in first], np.float64)

    def _upload(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, torch.Tensor], Mark | None]:
        """All arrays in one copy. The host does not wait for the copy."""
        if not arrays:
            return {}, None
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staging = self._queue.host_buffer(size // 4).view(torch.uint8)
        memory = staging.numpy()
        for name, array in arrays.items():
            memory[places[name] : places[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
        with self._queue.uploading():
            on_device = staging.to(self._queue.device, non_blocking=True)  # torch keeps `staging` until the copy ends
            uploaded = self._queue.mark()
        tensors = {}
        for name, array in arrays.items():
            part = on_device[places[name] : places[name] + array.nbytes]
            tensors[name] = part.view(_TORCH[array.dtype.type]).view(array.shape)
        return tensors, uploaded


_TORCH = {np.int32: torch.int32, np.int64: torch.int64, np.float64: torch.float64}


def _part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _drawn(chunks: Sequence[ScheduledChunk], rows: Sequence[int], top_ks: Mapping[int, int]) -> dict[str, np.ndarray]:
    samplings = [chunks[row].sequence.sampling for row in rows]
    settings = [(sampling.temperature, sampling.top_p, sampling.min_p) for sampling in samplings]
    keys = [draw_key(chunks[row].sequence.sampling.seed, chunks[row].start + chunks[row].num_tokens) for row in rows]
    return {
        "drawn.rows": np.array(rows, np.int32),
        "drawn.top_k": np.array([top_ks.get(row, 0) for row in rows], np.int32),
        "drawn.settings": np.array(settings, np.float64),
        "drawn.keys": np.array(keys, np.uint64).view(np.int64),
    }


def _adjusted(
    chunks: Sequence[ScheduledChunk],
    entries: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray]],
    rows_before: Mapping[str, int],
) -> dict[str, np.ndarray]:
    rows, token_ids, counts, biases = zip(*entries, strict=True)
    samplings = [chunks[row].sequence.sampling for row in rows]
    penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings]
    promised = [rows_before[chunks[row].sequence.sequence_id] if chunks[row].promised else -1 for row in rows]
    return {
        "adjusted.rows": np.array(rows, np.int32),
        "adjusted.first_entry": np.cumsum([0, *map(len, token_ids)], dtype=np.int32),
        "adjusted.token_ids": np.concatenate(token_ids),
        "adjusted.counts": np.concatenate(counts),
        "adjusted.first_bias": np.cumsum([0, *map(len, biases)], dtype=np.int32),
        "adjusted.biases": np.concatenate(biases),
        "adjusted.penalties": np.array(penalties, np.float64),
        "adjusted.promised": np.array(promised, np.int32),
    }
