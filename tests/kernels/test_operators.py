"""The operators find Triton's kernels here, not the references."""

from __future__ import annotations

from engine.gpu import ops
from engine.gpu.kernels import KERNELS


def test_every_kernel_has_a_contract() -> None:
    assert KERNELS.keys() <= ops.CONTRACTS.keys()
