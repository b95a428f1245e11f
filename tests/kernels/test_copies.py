"""The copy kernel: every byte of every run arrives, and no other byte changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gpu import copies, reference


def copy(runs: list[tuple[int, int, int]]) -> dict[int, int]:
    """Copy by the kernel. Returns the number of pieces by the bytes of an access."""
    pieces = copies.pieces_by_access(runs)
    for access_bytes, table in pieces.items():
        copies.copy_runs(torch.from_numpy(table), access_bytes)
    return {access_bytes: len(table) for access_bytes, table in pieces.items()}


def test_runs_of_several_pieces_arrive_and_nothing_else_changes() -> None:
    size = copies.PIECE_BYTES
    source = torch.randint(0, 256, (6 * size,), dtype=torch.uint8)
    target = torch.zeros(8 * size, dtype=torch.uint8)
    places = [(0, 5 * size + 64, 2 * size + 16), (3 * size, 16, 48), (4 * size + 32, size, size)]

    found = copy([(source.data_ptr() + a, target.data_ptr() + b, count) for a, b, count in places])

    expected = torch.zeros_like(target)
    for a, b, count in places:
        expected[b : b + count] = source[a : a + count]
    assert torch.equal(target, expected)
    assert found == {16: 5}


def test_shuffled_blocks_arrive() -> None:
    source = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    target = torch.zeros_like(source)
    order = torch.randperm(40).tolist()

    copy([(source[block].data_ptr(), target[place].data_ptr(), 64) for place, block in enumerate(order)])

    assert torch.equal(target, source[order])


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "num_bytes", "access_bytes"),
    [(0, 8, 64, 8), (4, 0, 64, 4), (0, 0, 30, 2), (3, 5, 101, 1), (16, 32, 16, 16)],
)
def test_odd_addresses_and_lengths_use_smaller_accesses(
    source_offset: int, target_offset: int, num_bytes: int, access_bytes: int
) -> None:
    source, target = torch.randint(0, 256, (256,), dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    expected = target.clone()
    expected[target_offset : target_offset + num_bytes] = source[source_offset : source_offset + num_bytes]

    found = copy([(source.data_ptr() + source_offset, target.data_ptr() + target_offset, num_bytes)])

    assert torch.equal(target, expected)
    assert found == {access_bytes: 1}


def test_pieces_cover_their_runs_once() -> None:
    random = np.random.default_rng(1)
    runs = [
        (int(source) << 24, int(target) << 24, int(count))
        for source, target, count in random.integers(1, 20 * copies.PIECE_BYTES, (200, 3))
    ]
    pieces = np.concatenate(list(copies.pieces_by_access(runs).values()))

    assert (pieces[:, 2] > 0).all()
    assert (pieces[:, 2] <= copies.PIECE_BYTES).all()
    joined: dict[tuple[int, int], int] = {}
    for source, target, count in pieces.tolist():  # a run's pieces follow each other
        begin = (source >> 24 << 24, target >> 24 << 24)
        assert (source - begin[0], target - begin[1]) == (joined.get(begin, 0),) * 2
        joined[begin] = joined.get(begin, 0) + count
    assert joined == {(source, target): count for source, target, count in runs}


def test_nothing_to_copy_launches_nothing() -> None:
    assert copy([]) == {}
    assert copy([(16, 32, 0)]) == {}


def test_the_reference_copies_the_same() -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    runs = torch.tensor([[source.data_ptr() + 16, target.data_ptr(), 32]])
    reference.copy_runs(runs, 16)
    assert target.tolist() == [*range(16, 48)] + [0] * 32
