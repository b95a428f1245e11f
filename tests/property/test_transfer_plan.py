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


def arrays_of(memory: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    """The arrays of all blocks, as views of [blocks, layers, 2, heads, tokens, bytes]. # memory: uint8"""
    blocks, shape = memory.reshape(POOL_BLOCKS, layout.block_bytes), layout.block_shape[:-1]
    num_tokens = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
    return [
        blocks[:, first : first + num_tokens * size].reshape(POOL_BLOCKS, *shape, size) for first, size in layout.arrays
    ]


def copy_by_element(
    plan: TransferPlan, maps: tuple[dict[int, int], ...], source: np.ndarray, target: np.ndarray
) -> None:
    """Copy every (token, layer, head) of both pools, one at a time."""
    ours, theirs = plan.source, plan.target
    num_tokens = min((max(m, default=-1) + 1) * at.block_size for m, at in zip(maps, (ours, theirs), strict=True))
    for token in range(num_tokens):
        (index, at), (their_index, their_at) = divmod(token, ours.block_size), divmod(token, theirs.block_size)
        if index not in maps[0] or their_index not in maps[1]:
            continue
        block, their_block = maps[0][index], maps[1][their_index]
        for layer in layers(ours) & layers(theirs):
            for head in heads(ours) & heads(theirs):
                piece = source[block, layer - ours.first_layer, :, head - ours.first_kv_head, at]
                target[their_block, layer - theirs.first_layer, :, head - theirs.first_kv_head, their_at] = piece


def layers(layout: KVLayout) -> set[int]:
    return set(range(layout.first_layer, layout.first_layer + layout.num_layers))


def heads(layout: KVLayout) -> set[int]:
    return set(range(layout.first_kv_head, layout.first_kv_head + layout.num_kv_heads))


@settings(max_examples=200, deadline=None)
@given(st.data(), layouts((1, 2, 4)), layouts((2, 4, 8)), st.sampled_from(["float16", FLOAT8]))
def test_a_plan_copies_exactly_the_parts_that_both_pools_hold(
    data: st.DataObject, source: KVLayout, target: KVLayout, dtype: str
) -> None:
    """Scales move with their values."""
    source, target = replace(source, dtype=dtype), replace(target, dtype=dtype)
    if not (layers(source) & layers(target) and heads(source) & heads(target)):
        with pytest.raises(LayoutMismatch):
            TransferPlan(source, target)
        return
    plan = TransferPlan(source, target)
    maps = (data.draw(block_maps(8)), data.draw(block_maps(8)))
    random = np.random.default_rng(3)
    ours, theirs = (random.integers(0, 256, POOL_BLOCKS * at.block_bytes, np.uint8) for at in (source, target))
    expected, found, runs = theirs.copy(), theirs.copy(), runs_of(plan, *maps)
    for from_array, to_array in zip(arrays_of(ours, source), arrays_of(expected, target), strict=True):
        assert np.shares_memory(to_array, expected)
        copy_by_element(plan, maps, from_array, to_array)
    for run in runs:
        piece = ours[run.source : run.source + run.num_bytes]
        assert len(piece) == run.num_bytes, "a run leaves the pool"
        found[run.target : run.target + run.num_bytes] = piece
    assert np.array_equal(found, expected)
    touched = sum(run.num_bytes for run in runs)
    assert touched == len({run.target + i for run in runs for i in range(run.num_bytes)}), "a byte is written twice"
    if not plan.moves_whole_blocks:
        pieces = range(8 * plan.source_parts)
        shared = [p for p in pieces if p // plan.source_parts in maps[0] and p // plan.target_parts in maps[1]]
        assert touched == len(shared) * plan.piece_bytes


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
