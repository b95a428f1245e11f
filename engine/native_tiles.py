"""Products by the CPU's tiles (AMX) take over only where they have been seen to be right, in this very process."""

from __future__ import annotations

import logging

import torch

from engine.cpu import permit_tiles
from engine.native_kernels import Ending, Kernels
from engine.native_linear import PackedLinear, panels_of

_log = logging.getLogger(__name__)

# Whole numbers, whose products' sums float32 holds exactly in any order: only equal results are right.
_LARGEST, _IN_SIZE, _OUT_SIZE = 8, 160, 70
_ROW_COUNTS = (1, 16, 45, 500)  # few rows, which vectors take; one tile; a pair; more than one block of rows


def take_tiles(kernels: Kernels, num_threads: int) -> bool:
    """Makes tiles the library's product for bfloat16. False where that cannot be, with the reason in the log."""
    vectors = kernels.bf16_linear
    if kernels.bf16_tiles is None:
        reason = "the library was compiled without them"
    elif not permit_tiles():
        reason = "the system does not permit them"
    else:
        kernels.bf16_linear = kernels.bf16_tiles
        if _multiplies_right(kernels, num_threads):
            return True
        kernels.bf16_linear = vectors
        reason = "their results are wrong"
    _log.warning("no bfloat16 products by tiles (AMX): %s. oneDNN multiplies instead.", reason)
    return False


def _multiplies_right(kernels: Kernels, num_threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator).bfloat16()

    weight, bias = whole_numbers(_OUT_SIZE, _IN_SIZE), whole_numbers(_OUT_SIZE)
    packed = panels_of(weight).contiguous()
    multiply = PackedLinear(kernels, packed, bias, _OUT_SIZE, num_threads, Ending.TO_FLOAT)
    for num_rows in _ROW_COUNTS:
        inputs = whole_numbers(num_rows, _IN_SIZE)
        if not torch.equal(multiply(inputs), inputs.float() @ weight.float().T + bias.float()):
            return False
    return True
