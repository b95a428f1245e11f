"""A TransferPlan against a copy element by element."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import LayoutMismatch
from core.kv_layout import FLOAT8, KVLayout
from kv_transfer.protocol.plan import ByteRun, TransferPlan, runs_of_blocks

POOL_BLOCKS = 10


def layouts(block_sizes: tuple[int, ...]) -> st.SearchStrategy[KVLayout]:
    return st.builds(
        KVLayout,
        model=st.just("m"),
        dtype=st.just("float16"),
        num_layers=st.integers(1, 3),
        num_kv_heads=st.integers(1, 3),
        block_size=st.sampled_from(block_sizes),
        head_dim=st.just(2),
        first_layer=st.integers(0, 2),
        first_kv_head=st.integers(0, 2),
    )


def block_maps(num_blocks: int) -> st.SearchStrategy[dict[int, int]]:
    """Some blocks of a sequence: index in the sequence -> any block of the pool."""
    indices = st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks)
    places = st.permutations(range(POOL_BLOCKS))
    return st.builds(lambda chosen, free: dict(zip(chosen, free, strict=False)), indices, places)


def pool(layout: KVLayout, seed: int) -> np.ndarray:
    shape = (POOL_BLOCKS, *layout.block_shape)
    return np.random.default_rng(seed).integers(1, 2**16, shape).astype(np.uint16)  # stands for float16


def runs_of(plan: TransferPlan, source_blocks: dict[int, int], target_blocks: dict[int, int]) -> list[ByteRun]:
    """The runs of all tokens in both maps. A map: index of a block in its sequence -> id in the pool."""
    if plan.moves_whole_blocks:
        common = sorted(source_blocks.keys() & target_blocks.keys())
        pairs = [(source_blocks[index], target_blocks[index]) for index in common]
        return [ByteRun(*run) for run in runs_of_blocks(pairs, plan.source.block_bytes)]
    pieces = sorted(index * plan.source_parts + part for index in source_blocks for part in range(plan.source_parts))
    triples = (
        (piece, source_blocks[piece // plan.source_parts], target_blocks[piece // plan.target_parts])
        for piece in pieces
        if piece // plan.target_parts in target_blocks
    )
    return [ByteRun(*run) for run in plan.runs_of_pieces(triples)]


def copy_by_plan(runs: list[ByteRun], source: np.ndarray, target: np.ndarray) -> np.ndarray:
    flat_source, flat_target = source.reshape(-1).view(np.uint8), target.copy().reshape(-1).view(np.uint8)
    for run in runs:
        piece = flat_source[run.source : run.source + run.num_bytes]
        assert len(piece) == run.num_bytes, "a run leaves the pool"
        flat_target[run.target : run.target + run.num_bytes] = piece
    return flat_target.view(np.uint16).reshape(target.shape)


def copy_by_element(
    plan: TransferPlan, maps: tuple[dict[int, int], ...], source: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """Copy every (token, layer, head) of both pools, one at a time."""
    ours, theirs, result = plan.source, plan.target, target.copy()
    num_tokens = min((max(m, default=-1) + 1) * at.block_size for m, at in zip(maps, (ours, theirs), strict=True))
    for token in range(num_tokens):
        (index, at), (their_index, their_at) = divmod(token, ours.block_size), divmod(token, theirs.block_size)
        if index not in maps[0] or their_index not in maps[1]:
            continue
        for layer in set(range(ours.first_layer, ours.first_layer + ours.num_layers)) & set(
            range(theirs.first_layer, theirs.first_layer + theirs.num_layers)
        ):
            for head in set(range(ours.first_kv_head, ours.first_kv_head + ours.num_kv_heads)) & set(
                range(theirs.first_kv_head, theirs.first_kv_head + theirs.num_kv_heads)
            ):
                piece = source[maps[0][index], layer - ours.first_layer, :, head - ours.first_kv_head, at]
                result[maps[1][their_index], layer - theirs.first_layer, :, head - theirs.first_kv_head, their_at] = (
                    piece
                )
    return result


def overlap(a: KVLayout, b: KVLayout) -> bool:
    """Whether two layouts have a layer and a head in common."""
    return (
        a.first_layer < b.first_layer + b.num_layers
        and b.first_layer < a.first_layer + a.num_layers
        and a.first_kv_head < b.first_kv_head + b.num_kv_heads
        and b.first_kv_head < a.first_kv_head + a.num_kv_heads
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), source=layouts((1, 2, 4)), target=layouts((2, 4, 8)))
def test_a_plan_copies_exactly_the_parts_that_both_pools_hold(
    data: st.DataObject, source: KVLayout, target: KVLayout
) -> None:
    if not overlap(source, target):
        with pytest.raises(LayoutMismatch):
            TransferPlan(source, target)
        return
    plan = TransferPlan(source, target)
    maps = (data.draw(block_maps(8)), data.draw(block_maps(8)))
    source_pool, target_pool = pool(source, 1), pool(target, 2)
    runs = runs_of(plan, *maps)
    by_plan = copy_by_plan(runs, source_pool, target_pool)
    assert np.array_equal(by_plan, copy_by_element(plan, maps, source_pool, target_pool))
    touched = sum(run.num_bytes for run in runs)
    assert touched == len({run.target + i for run in runs for i in range(run.num_bytes)}), "a byte is written twice"


@settings(max_examples=100, deadline=None)
@given(layout=layouts((2, 4)), maps=st.tuples(block_maps(8), block_maps(8)))
def test_equal_layouts_move_whole_blocks(layout: KVLayout, maps: tuple[dict[int, int], dict[int, int]]) -> None:
    plan = TransferPlan(layout, layout)
    runs = runs_of(plan, *maps)
    common = sorted(maps[0].keys() & maps[1].keys())
    assert sum(run.num_bytes for run in runs) == len(common) * layout.block_bytes
    breaks = sum((maps[0][b], maps[1][b]) != (maps[0][a] + 1, maps[1][a] + 1) for a, b in pairwise(common))
    assert len(runs) == (breaks + 1 if common else 0)


LAYOUT = KVLayout(model="m", dtype="float16", num_layers=2, num_kv_heads=2, block_size=4, head_dim=2)


def test_head_shards_of_equal_width_merge_within_a_layer() -> None:
    plan = TransferPlan(replace(LAYOUT, num_kv_heads=4), replace(LAYOUT, first_kv_head=2))
    runs = runs_of(plan, {0: 0}, {0: 0})
    assert len(runs) == 2 * 2  # layers x (K, V); the two heads of each merge
    assert {run.num_bytes for run in runs} == {2 * 4 * 2 * 2}  # heads x tokens x head_dim x bytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "n"}, {"model"}),
        ({"dtype": "bfloat16", "head_dim": 4}, {"dtype", "head_dim"}),
        ({"dtype": FLOAT8}, {"dtype"}),
        ({"block_size": 6}, {"block_size"}),
        ({"first_layer": 2}, {"first_layer", "num_layers"}),
        ({"first_kv_head": 5}, {"first_kv_head", "num_kv_heads"}),
    ],
)
def test_an_error_names_the_fields_that_cannot_be_translated(changes: dict[str, object], named: set[str]) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        TransferPlan(LAYOUT, replace(LAYOUT, **changes))  # type: ignore[arg-type]
    assert caught.value.differences.keys() == named


def arrays_of(memory: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    """The arrays of all blocks, as views of [blocks, layers, 2, heads, tokens, bytes]. # memory: uint8"""
    blocks, shape = memory.reshape(POOL_BLOCKS, layout.block_bytes), layout.block_shape[:-1]
    num_tokens = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
    return [
        blocks[:, first : first + num_tokens * size].reshape(POOL_BLOCKS, *shape, size) for first, size in layout.arrays
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), source=layouts((1, 2, 4)), target=layouts((2, 4, 8)))
def test_scales_move_with_their_values(data: st.DataObject, source: KVLayout, target: KVLayout) -> None:
    source, target = replace(source, dtype=FLOAT8), replace(target, dtype=FLOAT8)
    if not overlap(source, target):
        return
    plan = TransferPlan(source, target)
    maps = (data.draw(block_maps(8)), data.draw(block_maps(8)))
    random = np.random.default_rng(3)
    ours, theirs = (random.integers(0, 256, POOL_BLOCKS * at.block_bytes, np.uint8) for at in (source, target))
    runs = runs_of(plan, *maps)
    expected = theirs.copy()
    for from_array, to_array in zip(arrays_of(ours, source), arrays_of(expected, target), strict=True):
        assert np.shares_memory(to_array, expected)
        to_array[:] = copy_by_element(plan, maps, from_array, to_array)
    found = theirs.copy()
    for run in runs:
        found[run.target : run.target + run.num_bytes] = ours[run.source : run.source + run.num_bytes]
    assert np.array_equal(found, expected)
    if not plan.moves_whole_blocks:
        shared = [
            piece
            for piece in range(8 * plan.source_parts)
            if piece // plan.source_parts in maps[0] and piece // plan.target_parts in maps[1]
        ]
        assert sum(run.num_bytes for run in runs) == len(shared) * plan.piece_bytes
