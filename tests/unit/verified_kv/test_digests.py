"""Equal blocks have equal digests in any layout; any change of a computed row changes the digest of its block alone."""

from __future__ import annotations

import random

import pytest
import torch

from verified_kv.digests import BlockDigests, UnsupportedCache

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CONTENT, NUM_LAYERS = 6, 2, 8, 12, 3
KINDS = ("xxh3", "sums")


def random_caches(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CONTENT
    return {f"layer.{layer}": torch.randn(shape, generator=draws).to(dtype) for layer in range(NUM_LAYERS)}


def digests_of(
    caches: dict[str, torch.Tensor],
    blocks: list[int],
    num_tokens: int,
    kind: str = "xxh3",
    num_blocks: int = NUM_BLOCKS,
) -> list[bytes]:
    found = BlockDigests(caches, num_blocks, BLOCK_SIZE, kind).begin(blocks, num_tokens).poll()
    assert found is not None
    assert all(len(digest) == 16 for digest in found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_each_changed_bit_of_a_computed_row_changes_the_digest_of_its_block_alone(
    kind: str, dtype: torch.dtype
) -> None:
    blocks, num_tokens, draws = [4, 1, 5], 2 * BLOCK_SIZE + 3, random.Random(1)
    for number in range(50):
        caches = random_caches(number, dtype)
        before = digests_of(caches, blocks, num_tokens, kind)
        place, row = draws.randrange(len(blocks)), draws.randrange(BLOCK_SIZE)
        row_bytes = caches[f"layer.{draws.randrange(NUM_LAYERS)}"].view(torch.uint8)[
            blocks[place], draws.randrange(NUM_HEADS), row
        ]
        row_bytes[draws.randrange(len(row_bytes))] ^= 1 << draws.randrange(8)
        computed = place * BLOCK_SIZE + row < num_tokens
        after = digests_of(caches, blocks, num_tokens, kind)
        assert [one != other for one, other in zip(before, after, strict=True)] == [
            computed and changed == place for changed in range(len(blocks))
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_does_not_depend_on_the_layout_in_memory_or_on_the_block_id(kind: str) -> None:
    caches = random_caches(0)
    plain = digests_of(caches, [4, 1], 2 * BLOCK_SIZE - 1, kind)
    # Rows before heads, and blocks before layers: views as vLLM makes them for its other layouts.
    rows_first = {name: view.transpose(1, 2).contiguous().transpose(1, 2) for name, view in caches.items()}
    assert digests_of(rows_first, [4, 1], 2 * BLOCK_SIZE - 1, kind) == plain
    together = torch.stack(list(caches.values()), 1)
    blocks_first = {name: together[:, layer] for layer, name in enumerate(caches)}
    assert digests_of(blocks_first, [4, 1], 2 * BLOCK_SIZE - 1, kind) == plain
    moved = {name: view[[0, 4, 2, 1, 3, 5]] for name, view in caches.items()}
    assert digests_of(moved, [1, 3], 2 * BLOCK_SIZE - 1, kind) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_several_kernel_blocks_ends_at_its_computed_rows(kind: str) -> None:
    caches = {
        name: view.reshape(2 * NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE // 2, CONTENT)
        for name, view in random_caches(0).items()
    }
    before = digests_of(caches, [2], 5, kind)
    caches["layer.0"][2 * 2 + 1, :, 1:] += 1.0  # the sixth row and those behind it
    assert digests_of(caches, [2], 5, kind) == before
    caches["layer.0"][2 * 2 + 1, 0, 0, 0] += 1.0  # the fifth one
    assert digests_of(caches, [2], 5, kind) != before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_values_in_another_order_have_another_digest(kind: str, axis: int) -> None:
    """Of layers (0), heads, rows and contents."""
    caches = random_caches(0)
    names = sorted(caches)
    before = digests_of(caches, [1], BLOCK_SIZE, kind)
    if axis == 0:
        caches[names[0]], caches[names[1]] = caches[names[1]], caches[names[0]]
    else:
        caches[names[0]] = caches[names[0]].flip(axis)
    assert digests_of(caches, [1], BLOCK_SIZE, kind) != before


def test_caches_of_another_shape_or_kind_have_another_layout() -> None:
    layouts = {
        BlockDigests(random_caches(0), NUM_BLOCKS, BLOCK_SIZE).layout,
        BlockDigests(random_caches(0), NUM_BLOCKS, BLOCK_SIZE, "sums").layout,
        BlockDigests(random_caches(0, torch.float32), NUM_BLOCKS, BLOCK_SIZE).layout,
        BlockDigests(dict(list(random_caches(0).items())[1:]), NUM_BLOCKS, BLOCK_SIZE).layout,
    }
    assert len(layouts) == 4
    assert BlockDigests(random_caches(1), NUM_BLOCKS, BLOCK_SIZE).layout in layouts  # whatever the values


@pytest.mark.parametrize("shape", [(NUM_BLOCKS * 64,), (2, NUM_BLOCKS, BLOCK_SIZE, 12), (NUM_BLOCKS, 2, 7, 12)])
def test_a_cache_without_blocks_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCache, match=r"layer has the shape"):
        BlockDigests({"layer": torch.zeros(shape)}, NUM_BLOCKS, BLOCK_SIZE)
