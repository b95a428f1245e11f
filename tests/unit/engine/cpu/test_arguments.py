"""The callers of the kernels refuse tensors that a kernel would read or write outside their memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from engine.block_tables import StepTables
from engine.cpu.attention import _PagedBatch
from engine.cpu.ops import NativeOps
from engine.cpu.quantized_linear import NativeQuantizedLinear
from engine.cpu.sampling import NativeDraw
from tests.support.c_kernels import need_kernels
from tests.unit.engine.cpu.kernel_cases import AttentionCase, matrix_of

FLOAT, BFLOAT = torch.float32, torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = BFLOAT) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_ids_that_are_no_rows_of_a_quantized_matrix_are_refused_as_torch_does(bits: int) -> None:
    look_up = NativeQuantizedLinear(need_kernels(), 1).prepare_embedding(matrix_of(torch.randn(50, 33), bits, FLOAT))
    for wrong in (50, -1, 1 << 40):
        with pytest.raises(IndexError, match="matrix of 50 rows"):
            look_up(torch.tensor([0, wrong]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_stride_and_width_give_their_rows(dtype: torch.dtype) -> None:
    look_up = NativeQuantizedLinear(need_kernels(), 1).prepare_embedding(matrix_of(torch.randn(50, 33), 8, FLOAT))
    every_third = torch.arange(50, dtype=dtype)[::3]
    assert torch.equal(look_up(every_third), look_up(torch.arange(50))[::3])


OPS = {
    "an update of fewer rows": lambda ops: ops.add_rms_norm(rows(2, 64), rows(1, 64), rows(64), 1e-5),
    "an update of another dtype": lambda ops: ops.add_rms_norm(rows(2, 64, dtype=FLOAT), rows(2, 64), rows(64), 1e-5),
    "a weight of fewer columns": lambda ops: ops.add_rms_norm(rows(2, 64), None, rows(63), 1e-5),
    "a weight of another dtype": lambda ops: ops.add_rms_norm(rows(2, 64, dtype=FLOAT), None, rows(64), 1e-5),
    "more gates than ups": lambda ops: ops.silu_and_multiply(rows(2, 65)),
}


@pytest.mark.parametrize("call", OPS.values(), ids=OPS.keys())
def test_rows_that_do_not_fit_each_other_are_refused(call: Callable[[NativeOps], torch.Tensor]) -> None:
    with pytest.raises(AssertionError):
        call(NativeOps(need_kernels(), 1))


@pytest.mark.parametrize("inputs", [rows(2, 32, dtype=FLOAT), rows(2, 33)], ids=["fewer columns", "another dtype"])
def test_inputs_that_do_not_fit_a_quantized_matrix_are_refused(inputs: torch.Tensor) -> None:
    multiply = NativeQuantizedLinear(need_kernels(), 1).prepare(matrix_of(torch.randn(50, 33), 8, FLOAT), None)
    with pytest.raises(AssertionError):
        multiply(inputs)


def test_the_places_of_block_tables_do_not_overflow_in_a_large_array() -> None:
    case = AttentionCase(1, "float32", 64)
    large = np.broadcast_to(np.int32(0), (1 << 17, 1 << 15))  # of 16 GB, if it had its own memory
    rows_of_chunks = np.arange(len(case.chunks)) + (1 << 17) - len(case.chunks)
    tables = StepTables(large, rows_of_chunks, np.ones(len(case.chunks), np.int32))
    decodes = case.batch.num_tokens == 1
    places = _PagedBatch(case.batch, tables, decodes)._arrays["first_block"]
    assert places.dtype == np.int64
    assert places.tolist() == [row << 15 for row in rows_of_chunks[decodes].tolist()]


def test_heads_of_another_shape_than_the_steps_are_refused() -> None:
    case = AttentionCase(1, "float32", 64)
    step = case.native(need_kernels(), case.pool()).begin_step(case.batch, case.rotation)
    for wrong in (case.heads[1:], case.heads[:, 1:], case.heads[..., :32]):
        with pytest.raises(AssertionError, match="heads of every row"):
            step.attend(wrong.contiguous(), 0)


def test_a_mask_that_is_shorter_than_the_vocabulary_is_refused() -> None:
    draw, sampling = NativeDraw(need_kernels()), SamplingParams(max_tokens=1)
    logits = np.zeros(33, np.float32)
    assert draw(logits, sampling, 1, b"\0\0\0\0\1") == 32
    with pytest.raises(AssertionError, match="ends before the vocabulary"):
        draw(logits, sampling, 1, b"\0\0\0\1")
