"""The Triton kernels around a product of 8-bit codes (e4m3): `quantize_rows` before it, `scale_products` behind it.

The product itself is torch's `scaled_mm`. Both kernels are bound by memory. Behind a product of many tokens,
`scale_products` would cost more than a product that scales its own rows (engine/gpu/linear.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.fp8 import LARGEST_CODE, SMALLEST_MAXIMUM
from engine.gpu.attention_tiles import INTERPRETED

_MAX_TILE = 16_384  # values that a program of quantize_rows holds in registers
_SCALED_TILE = 1024


@triton.jit
def rounded_to_codes(values):
    """Round float32 to the values of e4m3. The interpreter's conversion loses carries, and cuts off small values."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    is_small = tl.abs(values) < 0.015625  # 2^-6: the codes below are multiples of 2^-9, as float32 is near 1.5 * 2^14
    return tl.where(is_small, (values + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


def quantize_rows(inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    num_rows, size = inputs.shape
    if num_rows == 0:
        return
    assert codes.is_contiguous()
    assert inputs.stride(1) == scales.stride(0) == 1
    tile = min(triton.next_power_of_2(size), _MAX_TILE)
    _quantize_rows[(num_rows,)](
        inputs,
        codes,
        scales,
        size,
        inputs.stride(0),
        INTERPRETED=INTERPRETED,
        LARGEST_CODE=LARGEST_CODE,
        SMALLEST_MAXIMUM=SMALLEST_MAXIMUM,
        TILE=tile,
        num_warps=min(max(tile // 512, 1), 16),
    )


@triton.jit
def _quantize_rows(
    inputs,
    codes,
    scales,
    size,
    stride,
    INTERPRETED: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    SMALLEST_MAXIMUM: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inputs += row * stride
    codes += row * size
    places = tl.arange(0, TILE)
    sizes = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        values = tl.load(inputs + start + places, mask=start + places < size, other=0.0)
        sizes = tl.maximum(sizes, tl.abs(values.to(tl.float32)))
    largest = tl.maximum(tl.max(sizes, axis=0), SMALLEST_MAXIMUM)
    inverse = LARGEST_CODE / largest
    for start in range(0, size, TILE):
        inside = start + places < size
        values = tl.load(inputs + start + places, mask=inside, other=0.0).to(tl.float32) * inverse
        values = tl.clamp(values, -LARGEST_CODE, LARGEST_CODE)  # the inverse is rounded
        if INTERPRETED:
            values = rounded_to_codes(values)
        tl.store(codes + start + places, values.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest / LARGEST_CODE)


def scale_products(
    products: torch.Tensor,
    token_scales: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: torch.Tensor,
) -> None:
    num_tokens, num_rows = products.shape
    if num_tokens == 0:
        return
    assert products.is_contiguous()
    assert outputs.is_contiguous()
    _scale_products[(num_tokens, triton.cdiv(num_rows, _SCALED_TILE))](
        products,
        token_scales,
        row_scales,
        row_scales if bias is None else bias,
        outputs,
        num_rows,
        HAS_BIAS=bias is not None,
        TILE=_SCALED_TILE,
        num_warps=4,
    )


@triton.jit
def _scale_products(
    products, token_scales, row_scales, bias, outputs, num_rows, HAS_BIAS: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = rows < num_rows
    scale = tl.load(row_scales + rows, mask=inside, other=0.0) * tl.load(token_scales + token)
    result = tl.load(products + token * num_rows + rows, mask=inside, other=0.0) * scale
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + token * num_rows + rows, result.to(outputs.dtype.element_ty), mask=inside)
