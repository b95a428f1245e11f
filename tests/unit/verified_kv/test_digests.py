"""Equal blocks have equal digests in any layout; any change of a block changes its digest, and no other one."""

from __future__ import annotations

import random

import pytest
import torch

from verified_kv.digests import BlockDigests, UnsupportedCache

NUM_BLOCKS, NUM_HEADS, NUM_ROWS, CONTENT, NUM_LAYERS = 6, 2, 8, 12, 3
KINDS = ("xxh3", "sums")
Caches = dict[str, torch.Tensor]


def random_caches(seed: int, dtype: torch.dtype = torch.bfloat16) -> Caches:
    draws = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS, NUM_HEADS, NUM_ROWS, CONTENT
    return {f"layer.{layer}": torch.randn(shape, generator=draws).to(dtype) for layer in range(NUM_LAYERS)}


def digests_of(caches: Caches, blocks: list[int], kind: str) -> list[bytes]:
    found = BlockDigests(caches, NUM_BLOCKS, kind).begin(blocks).poll()
    assert found is not None
    assert all(len(digest) == 16 for digest in found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_each_flipped_bit_changes_the_digest_of_its_block_alone(kind: str, dtype: torch.dtype) -> None:
    blocks, draws = [4, 1, 5], random.Random(1)
    for number in range(50):
        caches = random_caches(number, dtype)
        before = digests_of(caches, blocks, kind)
        place, layer = draws.randrange(len(blocks)), f"layer.{draws.randrange(NUM_LAYERS)}"
        content = caches[layer].view(torch.uint8)[blocks[place], draws.randrange(NUM_HEADS), draws.randrange(NUM_ROWS)]
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        after = digests_of(caches, blocks, kind)
        assert [one != other for one, other in zip(before, after, strict=True)] == [i == place for i in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_depends_on_neither_the_layout_in_memory_nor_the_id_of_the_block(kind: str) -> None:
    caches = random_caches(0)
    plain = digests_of(caches, [4, 1], kind)
    # Rows before heads, and blocks before layers: views as vLLM makes them for its other layouts.
    rows_first = {name: view.transpose(1, 2).contiguous().transpose(1, 2) for name, view in caches.items()}
    assert digests_of(rows_first, [4, 1], kind) == plain
    together = torch.stack(list(caches.values()), 1)
    assert digests_of({name: together[:, layer] for layer, name in enumerate(caches)}, [4, 1], kind) == plain
    moved = {name: view[[0, 4, 2, 1, 3, 5]] for name, view in caches.items()}
    assert digests_of(moved, [1, 3], kind) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_all_of_its_kernel_blocks(kind: str) -> None:
    shape = 2 * NUM_BLOCKS, NUM_HEADS, NUM_ROWS // 2, CONTENT
    caches = {name: view.reshape(shape) for name, view in random_caches(0).items()}
    before = digests_of(caches, [0, 1, 2], kind)
    caches["layer.0"][3] += 1.0
    after = digests_of(caches, [0, 1, 2], kind)
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_values_in_another_order_have_another_digest(kind: str, axis: int) -> None:
    """Of layers (0), heads, rows and contents."""
    caches = random_caches(0)
    before = digests_of(caches, [1], kind)
    if axis == 0:
        caches["layer.0"], caches["layer.1"] = caches["layer.1"], caches["layer.0"]
    else:
        caches["layer.0"] = caches["layer.0"].flip(axis)
    assert digests_of(caches, [1], kind) != before


def test_caches_of_another_shape_or_kind_have_another_layout() -> None:
    layouts = {
        BlockDigests(random_caches(0), NUM_BLOCKS).layout,
        BlockDigests(random_caches(0), NUM_BLOCKS, "sums").layout,
        BlockDigests(random_caches(0), NUM_BLOCKS // 2).layout,
        BlockDigests(random_caches(0, torch.float32), NUM_BLOCKS).layout,
        BlockDigests(dict(list(random_caches(0).items())[1:]), NUM_BLOCKS).layout,
    }
    assert len(layouts) == 5
    assert BlockDigests(random_caches(1), NUM_BLOCKS).layout in layouts  # whatever the values


@pytest.mark.parametrize("shape", [(NUM_BLOCKS * 64,), (2, NUM_BLOCKS, 2, 8, 12), (NUM_BLOCKS + 1, 2, 8, 12)])
def test_a_cache_whose_blocks_cannot_be_found_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCache, match=f"of a layer is not {NUM_BLOCKS} blocks"):
        BlockDigests({"a layer": torch.zeros(shape)}, NUM_BLOCKS)
