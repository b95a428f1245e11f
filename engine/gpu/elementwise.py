"""The kernels between the matrix products: residual + RMS norm, and the gated activation of the MLP.

Both are bound by memory: a program reads each of its values once, with 16-byte accesses where the rows allow it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.early_launch import early_launch, follow

MAX_HIDDEN_SIZE = 1 << 15  # of a row that one program holds in registers
_TILE = 1024  # values of a row that one program of silu_and_multiply computes


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, normed: torch.Tensor
) -> None:
    num_rows, size = hidden.shape
    assert size <= MAX_HIDDEN_SIZE, f"a row of {size} values does not fit in the registers of a program"
    if num_rows == 0:
        return
    added = hidden if update is None else update
    assert hidden.stride(1) == added.stride(1) == normed.stride(1) == weight.stride(0) == 1
    tile = triton.next_power_of_2(size)
    _add_rms_norm[(num_rows,)](
        hidden,
        added,
        weight,
        normed,
        epsilon,
        size,
        hidden.stride(0),
        added.stride(0),
        normed.stride(0),
        ADD=update is not None,
        TILE=tile,
        num_warps=min(max(tile // 512, 1), 16),
        **early_launch(),
    )


@triton.jit
def _add_rms_norm(
    hidden,
    update,
    weight,
    normed,
    epsilon,
    size,
    hidden_stride,
    update_stride,
    normed_stride,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    inside = places < size
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    follow(EARLY)
    hidden += row * hidden_stride
    value = tl.load(hidden + places, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the dtype of the residual before it is normed, as two operations would do.
        added = tl.load(update + row * update_stride + places, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(hidden + places, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + epsilon)
    result = value * scale * factor
    tl.store(normed + row * normed_stride + places, result.to(normed.dtype.element_ty), mask=inside)


def silu_and_multiply(gate_up: torch.Tensor, activated: torch.Tensor) -> None:
    num_rows, size = activated.shape
    if num_rows == 0:
        return
    assert gate_up.shape == (num_rows, 2 * size)
    assert gate_up.stride(1) == activated.stride(1) == 1
    _silu_and_multiply[(num_rows, triton.cdiv(size, _TILE))](
        gate_up, activated, size, gate_up.stride(0), activated.stride(0), TILE=_TILE, num_warps=4, **early_launch()
    )


@triton.jit
def _silu_and_multiply(
    gate_up, activated, size, gate_up_stride, activated_stride, TILE: tl.constexpr, EARLY: tl.constexpr
):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = places < size
    gate_up += row * gate_up_stride
    gate = tl.load(gate_up + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + places, mask=inside, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # never above 1, so no gate overflows
    result = gate * tl.where(gate >= 0, 1.0, decay) / (1.0 + decay) * up
    tl.store(activated + row * activated_stride + places, result.to(activated.dtype.element_ty), mask=inside)
