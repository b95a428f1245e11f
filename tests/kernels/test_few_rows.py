"""`multiply_few_rows` against its reference."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.ops import FEW_ROWS, FEW_ROWS_COLUMNS, FEW_ROWS_TILE
from tests.kernels.attention_cases import by_both

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2**-7}


def compare(
    num_tokens: int,
    tiles: tuple[int, int],  # of the matrix: of rows, of columns
    num_programs: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    shape = (tiles[0] * FEW_ROWS_TILE, tiles[1] * FEW_ROWS_COLUMNS)
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = torch.randn(num_tokens, shape[1], generator=generator).to(dtype)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    counters = torch.zeros(tiles[0], dtype=torch.int32, device=device)
    outputs = torch.full((num_tokens, shape[0]), torch.nan, dtype=dtype)
    partial = torch.full((num_programs + tiles[0], num_tokens, FEW_ROWS_TILE), torch.nan)
    arguments = (inputs, weight, partial, counters, outputs)
    expected, found = by_both("multiply_few_rows", device, arguments, outputs)
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert not counters.any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, FEW_ROWS])
def test_rows_of_every_dtype(num_tokens: int, dtype: torch.dtype) -> None:
    compare(num_tokens, (2, 3), num_programs=2, dtype=dtype)


# One program; programs with several tiles; a tile of several programs; programs of one unit
@pytest.mark.parametrize(
    ("tiles", "num_programs"), [((3, 1), 1), ((5, 2), 2), ((5, 3), 2), ((2, 5), 7), ((3, 2), 6), ((1, 4), 3)]
)
def test_tiles_of_several_programs(tiles: tuple[int, int], num_programs: int) -> None:
    compare(2, tiles, num_programs)
