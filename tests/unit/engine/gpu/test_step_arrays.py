"""The inputs of a step as arrays, and their places in one flat run."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.device_queue import HostQueue
from engine.gpu.ops import PREFILL_TILE_TOKENS
from engine.gpu.step_arrays import NOT_PROMISED, StepArranger, tiles
from engine.gpu.step_buffers import StagingSet, places

BLOCKS = [5, 3, 9, 1, 7, 2]


def chunk(name: str, start: int, count: int, samples: bool = True, promised: bool = False) -> ScheduledChunk:
    token_ids = [100 * len(name) + place for place in range(start + count)]
    view = SequenceView(name, token_ids, start + count, BLOCKS, SamplingParams(max_tokens=1))
    return ScheduledChunk(view, start, count, samples, promised)


def test_the_arrays_of_a_mixed_step() -> None:
    chunks = [chunk("a", 4, 1, promised=True), chunk("bb", 2, 3), chunk("ccc", 0, 1, samples=False)]
    arrays = StepArranger(num_blocks=10, block_size=4).arrange(chunks, {"z": 0, "a": 1})
    assert arrays.token_ids.tolist() == [0, 202, 203, 204, 300]
    assert arrays.sources.tolist() == [1, *[NOT_PROMISED] * 4]
    assert arrays.positions.tolist() == [4, 2, 3, 4, 0]
    assert arrays.slots.tolist() == [12, 22, 23, 12, 20]
    assert arrays.sampling_rows.tolist() == [0, 3]
    assert arrays.decode_row.tolist() == [0, 4]
    assert arrays.decode_positions.tolist() == [5, 1]
    assert (arrays.prefill_row.tolist(), arrays.prefill_start.tolist()) == ([1], [2])
    assert arrays.prefill_tokens.tolist() == [3]
    runs = [*BLOCKS[:2], *BLOCKS[:2], *BLOCKS[:1]]
    assert arrays.block_ids.tolist() == runs
    assert (arrays.decode_block.tolist(), arrays.prefill_block.tolist()) == ([0, 4], [2])
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_padding_sequences_have_one_token_in_the_padding_block() -> None:
    arranger = StepArranger(num_blocks=10, block_size=4)
    arrays = arranger.padded(arranger.arrange([chunk("a", 4, 1)], {}), 4)
    assert arrays.slots.tolist() == [12, 40, 40, 40]
    assert arrays.decode_positions.tolist() == [5, 1, 1, 1]
    assert arrays.block_ids[arrays.decode_block].tolist() == [5, 10, 10, 10]
    assert arrays.decode_row.tolist() == [0, 1, 2, 3]
    assert len(arrays.sampling_rows) == 0


@given(st.lists(st.integers(2, 4 * PREFILL_TILE_TOKENS), max_size=5))
def test_every_token_of_a_chunk_is_in_one_tile(num_tokens: list[int]) -> None:
    chunk_of_tile, first = tiles(np.array(num_tokens, np.int32))
    assert first.tolist() == sorted(first.tolist(), reverse=True)
    covered = sorted(zip(chunk_of_tile.tolist(), first.tolist(), strict=True))
    assert covered == [
        (chunk, start) for chunk, count in enumerate(num_tokens) for start in range(0, count, PREFILL_TILE_TOKENS)
    ]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_fields_begin_at_multiples_of_16_bytes_and_do_not_overlap(sizes: list[int]) -> None:
    begins, end = places(sizes)
    assert all(begin % 4 == 0 for begin in begins)
    for begin, size, following in zip(begins, sizes, [*begins[1:], end], strict=True):
        assert begin + size <= following


def test_a_staging_set_grows_and_shows_the_arrays() -> None:
    staging = StagingSet(HostQueue(torch.device("cpu")), capacity=4)
    for count in (2, 90, 3):
        arrays = StepArranger(10, 16).arrange([chunk("a", 0, count), chunk("bb", count, 1)], {})
        staged = staging.stage(arrays)
        for array, tensor in zip(arrays, staged.tensors(), strict=True):
            assert array.tolist() == tensor.tolist()
        assert staged.max_context == count + 1
