"""Sizes that the contracts of `engine/gpu/ops.py` share with the kernels, which it imports."""

from __future__ import annotations

# One tile of a prompt chunk in `prefill_attention`: this many tokens.
PREFILL_TILE_TOKENS = 64

FEW_ROWS = 8  # the most rows of inputs of `multiply_few_rows`. At 32, torch's product is faster
FEW_ROWS_TILE = 64  # rows of the matrix of one program
FEW_ROWS_COLUMNS = 128  # of the matrix in one tile
