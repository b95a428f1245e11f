"""The Triton kernels behind the operators of `engine/gpu/ops.py`, by the operator's name."""

from __future__ import annotations

from collections.abc import Callable

from engine.gpu import elementwise

KERNELS: dict[str, Callable[..., None]] = {
    "add_rms_norm": elementwise.add_rms_norm,
    "silu_and_multiply": elementwise.silu_and_multiply,
}
