"""The angles of a step are those of each position alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.rotary import RotaryTable

FREQUENCIES = 10_000.0 ** -(torch.arange(64) / 64)


@pytest.mark.parametrize("positions", [[0], [7], [2999], [5, 0, 5], range(100, 400), range(3000)])
def test_a_table_has_the_bits_of_angles_that_are_computed_for_the_step(positions: list[int]) -> None:
    table = RotaryTable(FREQUENCIES, 3000)
    rotation = table.rows(np.array(positions, np.int32))
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * FREQUENCIES
    assert torch.equal(rotation.cosine, angles.cos())
    assert torch.equal(rotation.sine, angles.sin())


def test_a_position_behind_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        RotaryTable(FREQUENCIES, 8).rows(np.array([8], np.int32))
