"""The C kernels behind the `Ops` interface."""

from __future__ import annotations

import torch

from engine.cpu.kernels import Kernels


class NativeOps:
    """For float32 and bfloat16 on the CPU."""

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        self.kernels = kernels
        self.num_threads = num_threads

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        assert hidden.is_contiguous(), "the kernel changes hidden in place"
        assert update is None or (update.shape == hidden.shape and update.dtype is hidden.dtype), "rows do not match"
        assert weight.shape == hidden.shape[1:], "the kernel would read past the weight's end"
        assert weight.dtype is hidden.dtype, "the kernel reads a weight of the rows' dtype"
        update = None if update is None else update.contiguous()
        normed = torch.empty_like(hidden) if update is None else update  # the update's lines are in the cache
        self.kernels.add_rms_norm(
            hidden.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            hidden.shape[0],
            hidden.shape[1],
            epsilon,
            hidden.dtype is torch.bfloat16,
            self.num_threads,
        )
        return normed

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.shape[1] % 2 == 0, "gate and up have the same size"
        gate_up = gate_up.contiguous()
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        activated = gate_up.new_empty((num_rows, size))
        self.kernels.silu_and_multiply(
            gate_up.data_ptr(),
            activated.data_ptr(),
            num_rows,
            size,
            gate_up.dtype is torch.bfloat16,
            self.num_threads,
        )
        return activated
