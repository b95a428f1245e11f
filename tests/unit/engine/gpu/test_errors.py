"""`sort_error` tells a step without memory from a lost device, and both from every other exception."""

from __future__ import annotations

import pytest
import torch

from core.errors import DeviceLost, OutOfDeviceMemory, TandemError, TransportError
from engine.gpu.errors import sort_error

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
]
LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("an error that this version does not know"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA driver error: the launch timed out and was terminated"),
]
OTHER = [
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    ValueError("CUDA error: the text of an exception that no CUDA library raises"),
    MemoryError(),
    AssertionError("out of memory"),
]


KINDS = [*((error, OutOfDeviceMemory) for error in NO_MEMORY), *((error, DeviceLost) for error in LOST)]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=str)
def test_too_little_memory_ends_only_the_sequence_and_an_error_that_stays_the_worker(
    error: Exception, kind: type[TandemError]
) -> None:
    found = sort_error(error)
    assert type(found) is kind
    assert found.retryable
    assert str(error).splitlines()[0] in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize("error", OTHER, ids=lambda error: str(error) or type(error).__name__)
def test_other_exceptions_say_nothing_about_the_device(error: Exception) -> None:
    assert sort_error(error) is None


def test_a_cause_is_found_behind_other_exceptions() -> None:
    cause, effect = torch.AcceleratorError("CUDA error: unspecified launch failure"), ValueError("no logits")
    effect.__cause__ = cause
    assert isinstance(sort_error(effect), DeviceLost)
    while_handled = KeyError("a row")
    while_handled.__context__ = effect
    assert isinstance(sort_error(while_handled), DeviceLost)


def test_a_sorted_error_is_returned_as_it_is() -> None:
    for error in (DeviceLost("gone"), OutOfDeviceMemory("full"), TransportError("a peer is gone")):
        assert sort_error(error) is error


def test_an_exception_that_is_its_own_context_ends_the_search() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert sort_error(first) is None
