"""Launches that cover the compiled variants of every kernel: `tests/kernels/test_compile.py` compiles them for sm_90.

A launch calls the launcher of a kernel with meta tensors of real sizes. So the launcher itself chooses the types and
the constants, as it does in service, and Triton sees the strides of a large pool. Nothing runs.

`in_ci` marks the few that every test run compiles: the served dtype, and where a shape changes the code. The others run
on demand: `python -m tests.support.compile_kernels --all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from engine.gpu.kernels import KERNELS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Variant(NamedTuple):
    name: str
    launch: Callable[[], object]
    in_ci: bool
    # Beginnings of the machine instructions that the code must contain, such as LDG.E.128 or HGMMA.
    instructions: tuple[str, ...] = ()


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def variants() -> Iterator[Variant]:
    yield from _elementwise()


def _elementwise() -> Iterator[Variant]:
    for dtype in DTYPES:
        served = dtype is torch.bfloat16
        for size in (576, 4096, 8192, 16384):
            rows, weight = meta(256, size, dtype=dtype), meta(size, dtype=dtype)
            for update in (rows, None):
                yield Variant(
                    f"add_rms_norm {dtype} {size} {'with' if update is rows else 'without'} update",
                    partial(KERNELS["add_rms_norm"], rows, update, weight, 1e-5, rows),
                    in_ci=served and size in (4096, 16384) and update is rows,
                    instructions=("LDG.E.128", "STG.E.128"),
                )
        for size in (1536, 14336):
            yield Variant(
                f"silu_and_multiply {dtype} {size}",
                partial(KERNELS["silu_and_multiply"], meta(256, 2 * size, dtype=dtype), meta(256, size, dtype=dtype)),
                in_ci=served and size == 14336,
                instructions=("LDG.E.128", "STG.E.128"),
            )
