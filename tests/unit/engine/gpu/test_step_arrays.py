"""The inputs of a step as arrays, and their places in one flat run."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.cpu_graph import CpuGraph, NotCapturable
from engine.gpu.device_queue import HostQueue
from engine.gpu.graphs import MAX_PROMPTS, buckets_up_to, graph_sizes
from engine.gpu.ops import PREFILL_TILE_TOKENS
from engine.gpu.step_arrays import NO_TILE, NOT_PROMISED, GraphSize, StepArranger, StepArrays, tiles
from engine.gpu.step_attention import OperatorAttention, OperatorOps
from engine.gpu.step_buffers import StagingSet, places, tensors_in
from engine.linear import PlainLinear
from engine.loading import ModelSetup
from engine.model import Model, ModelInputs
from engine.model_weights import allocate_weights
from engine.rotary import RotaryTable
from engine.runner import StepLimits
from model_files.builtin_configs import RANDOM_CONFIGS

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
    assert (arrays.decode_block.tolist(), arrays.decode_block_ids.tolist()) == ([0, 2], [*BLOCKS[:2], *BLOCKS[:1]])
    assert (arrays.prefill_block.tolist(), arrays.prefill_block_ids.tolist()) == ([0], BLOCKS[:2])
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_each_draft_is_a_row_that_attends_to_the_positions_up_to_its_own() -> None:
    drafted = chunk("a", 4, 1)._replace(drafts=(8, 9))
    arrays = StepArranger(num_blocks=10, block_size=4).arrange([drafted, chunk("bb", 2, 3), chunk("c", 0, 1)], {})
    assert arrays.token_ids.tolist() == [104, 8, 9, 202, 203, 204, 100]
    assert arrays.sampling_rows.tolist() == [0, 1, 2, 5, 6]
    assert arrays.decode_row.tolist() == [0, 1, 2, 6]
    assert arrays.decode_positions.tolist() == [5, 6, 7, 1]
    assert arrays.decode_block.tolist() == [0, 0, 0, 2]
    assert arrays.prefill_row.tolist() == [3]


def test_padding_sequences_have_one_token_in_the_padding_block() -> None:
    arranger = StepArranger(num_blocks=10, block_size=4)
    arrays = arranger.padded(arranger.arrange([chunk("a", 4, 1)], {}), GraphSize(4, 4))
    assert arrays.slots.tolist() == [12, 40, 40, 40]
    assert arrays.decode_positions.tolist() == [5, 1, 1, 1]
    assert arrays.decode_block_ids[arrays.decode_block].tolist() == [5, 10, 10, 10]
    assert arrays.decode_row.tolist() == [0, 1, 2, 3]
    assert len(arrays.sampling_rows) == 0


LIMITS = StepLimits(max_running=20, max_batched_tokens=700)


@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_graph_holds_each_step_within_its_limits_and_padding_changes_nothing_else(
    counts: list[int], chance: random.Random
) -> None:
    chunks = [
        chunk("a" * (place + 1), chance.randrange(9), count, samples=chance.random() < 0.7 or count == 1)
        for place, count in enumerate(counts)
    ]
    arrays = StepArranger(num_blocks=10, block_size=64).arrange(chunks, {})
    num_prompts, num_tokens = sum(count > 1 for count in counts), sum(counts)
    size = min((size for size in graph_sizes(LIMITS) if size.holds(arrays)), default=None)
    if num_prompts > MAX_PROMPTS or num_tokens >= LIMITS.max_batched_tokens:
        return
    assert size is not None
    assert size.rows - num_tokens <= max(64, num_tokens // 4)
    padded = StepArranger(num_blocks=10, block_size=64).padded(arrays, size)
    assert padded.sizes[:4] == (size.rows,) * 4
    assert [len(padded.tile_chunk), len(padded.prefill_row)] == [size.tiles, size.prompts]
    moved = {"prefill_block", "prefill_block_ids"} | ({"sampling_rows"} if not num_prompts else set())
    for name in set(StepArrays._fields) - moved:
        before, after = getattr(arrays, name), getattr(padded, name)
        assert after[: len(before)].tolist() == before.tolist()
    begins = padded.prefill_block[:num_prompts]
    assert padded.decode_block_ids[begins].tolist() == arrays.prefill_block_ids[arrays.prefill_block].tolist()
    assert set(padded.slots[num_tokens:]) <= {10 * 64}
    assert set(padded.tile_chunk[len(arrays.tile_chunk) :]) <= {NO_TILE}
    own = range(num_tokens, size.rows)
    assert all(row in own for row in padded.decode_row[len(arrays.decode_row) :]), "padding attends into its own rows"


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


# ---- The computation of a step runs on the meta device, which has no values: the host waits for none.

META = torch.device("meta")
BLOCK_SIZE, NUM_BLOCKS = 16, 32


STEPS = {
    "prefill": [chunk("a", 0, 40), chunk("b", 0, 7)],
    "chunked prefill": [chunk("a", 24, 70, samples=False)],
    "decode": [chunk("a", 40, 1), chunk("b", 7, 1, promised=True)],
    "mixed": [chunk("a", 40, 1, promised=True), chunk("b", 16, 20), chunk("c", 3, 1, samples=False)],
}


@pytest.mark.parametrize("name", [name for name in RANDOM_CONFIGS if name.endswith("tiny")])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_reads_no_value_on_the_host(name: str, step: str) -> None:
    setup = ModelSetup.of(EngineConfig(model=f"random:{name}", device="cpu", dtype="bfloat16", num_threads=1), None)
    config, ops = setup.model_config, OperatorOps()
    model = Model(allocate_weights(config, torch.bfloat16, META), PlainLinear(ops), ops)
    table = RotaryTable(torch.empty(config.head_dim // 2, device=META), NUM_BLOCKS * BLOCK_SIZE)
    pool = torch.empty((NUM_BLOCKS + 1, *setup.layout.block_shape), dtype=torch.bfloat16, device=META)
    arrays = StepArranger(NUM_BLOCKS, BLOCK_SIZE).arrange(STEPS[step], {"a": 0, "b": 1})
    flat = torch.empty(places(arrays.sizes)[1], dtype=torch.int32, device=META)
    tensors = tensors_in(flat, arrays.sizes)
    attention = OperatorAttention(pool, table, tensors, int(arrays.decode_positions.max(initial=0)), lambda *_: 3)
    logits = model.compute(ModelInputs(tensors.token_ids, tensors.sampling_rows, attention))
    assert logits.is_meta
    assert logits.shape == (sum(chunk.samples for chunk in STEPS[step]), config.vocab_size)


# ---- `CpuGraph` finds what a graph would do wrong.


def test_a_replay_computes_with_new_inputs_at_the_same_addresses() -> None:
    given, kept = torch.ones(3), torch.zeros(3)
    graph = CpuGraph(lambda: kept.add_((given * 2).view(3)) + 1)
    address = graph.result.data_ptr()
    kept.zero_()
    given.fill_(5.0)
    graph.replay()
    assert graph.result.tolist() == [11.0] * 3
    assert graph.result.data_ptr() == address


def test_memory_of_the_capture_holds_nothing_between_replays() -> None:
    given = torch.ones(3)
    graph = CpuGraph(lambda: torch.empty(3).mul(0.0) + given)
    graph.replay()
    assert graph.result.isnan().all(), "the computation reads memory that it has not written"


def test_a_tensor_that_only_the_caller_of_the_capture_held_is_missed() -> None:
    def compute() -> torch.Tensor:
        return torch.ones(3) + inputs.pop()

    inputs = [torch.ones(3)]
    with pytest.raises(NotCapturable, match="ones"):
        CpuGraph(compute)
    inputs = [torch.ones(3)]
    graph = CpuGraph(lambda: inputs.pop() * 2)
    with pytest.raises(NotCapturable, match="is gone"):
        graph.replay()


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool(x[0] > 0), lambda x: x.sort()],
    ids=["item", "nonzero", "boolean index", "branch", "not on the list"],
)
def test_operators_that_a_graph_must_not_hold_are_refused(compute: object) -> None:
    given = torch.ones(3)
    with pytest.raises(NotCapturable, match="a graph must not hold"):
        CpuGraph(lambda: compute(given))  # type: ignore[operator]


@pytest.mark.parametrize("max_running", [1, 2, 7, 8, 64, 100, 256, 300])
def test_buckets_reach_the_limit_and_waste_little(max_running: int) -> None:
    buckets = buckets_up_to(max_running)
    assert buckets[0] == 1
    assert buckets[-1] == max_running
    assert buckets == sorted(set(buckets))
    for before, bucket in itertools.pairwise(buckets):
        assert bucket - before <= max(before, 1) if bucket <= 16 else bucket - before <= max(16, before // 8)
