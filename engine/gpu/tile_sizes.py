"""Sizes that the contracts of `engine/gpu/ops.py` share with the kernels, which it imports."""

from __future__ import annotations

# One tile of a prompt chunk in `prefill_attention`: this many tokens.
PREFILL_TILE_TOKENS = 64
