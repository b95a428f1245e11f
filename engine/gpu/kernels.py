"""The Triton kernels behind the operators of `engine/gpu/ops.py`, by the operator's name."""

from __future__ import annotations

from collections.abc import Callable

KERNELS: dict[str, Callable[..., None]] = {}
