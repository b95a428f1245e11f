"""The copy kernel: every byte of every run arrives, and no other byte changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gpu import copies, reference


def copy(runs: list[tuple[int, int, int]]) -> dict[int, int]:
    """Copy by the kernel. Returns the number of pieces by the bytes of an access."""
    by_access = copies.runs_by_access(runs)
    for access_bytes, (table, num_pieces) in by_access.items():
        copies.copy_runs(torch.from_numpy(table), num_pieces, access_bytes)
    return {access_bytes: num_pieces for access_bytes, (_, num_pieces) in by_access.items()}


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


def test_many_runs_of_many_lengths_arrive() -> None:
    lengths = [16 * count for count in np.random.default_rng(1).integers(1, 5000, 60).tolist()]
    source = torch.randint(0, 256, (sum(lengths),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()  # of the runs in the target
    places = dict(zip(order, np.cumsum([0, *(lengths[run] for run in order[:-1])]).tolist(), strict=True))

    found = copy(
        [(source.data_ptr() + begins[run], target.data_ptr() + places[run], lengths[run]) for run in range(60)]
    )

    assert torch.equal(target, torch.cat([source[begins[run] :][: lengths[run]] for run in order]))
    assert found == {16: sum(-(-length // copies.PIECE_BYTES) for length in lengths)}


def test_nothing_to_copy_launches_nothing() -> None:
    assert copy([]) == {}
    assert copy([(16, 32, 0)]) == {}


def test_the_reference_copies_the_same() -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    runs = torch.tensor([[source.data_ptr() + 16, target.data_ptr(), 32, 0]])
    reference.copy_runs(runs, 1, 16)
    assert target.tolist() == [*range(16, 48)] + [0] * 32
