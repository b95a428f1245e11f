"""Sorts the exceptions of torch, Triton and the CUDA libraries by what the worker must do.

    no memory for the step     -> OutOfDeviceMemory    the worker goes on; another worker may have more memory
    the context is destroyed   -> DeviceLost           every later CUDA call fails: the process must end
    the call was refused       -> None                 the step fails; the device computes the next one
    no error of a device       -> None

CUDA calls are asynchronous, so an error of a kernel appears in some later call. An unknown CUDA error counts as a lost
device: a worker that goes on without a device fails every request that it attracts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from core.errors import DeviceLost, OutOfDeviceMemory, TandemError

# All texts are those of cudaGetErrorString or of the name of a status, in lower case.
_DEVICE_PREFIXES = ("cuda error", "cuda driver error", "triton error [cuda]", "cublas_status", "cudnn_status")
_NO_MEMORY = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # cublasCreate found no memory
    "cudnn_status_alloc_failed",
)
# CUDA refuses these calls before anything runs, and the context stays whole.
_REFUSED = (
    "invalid argument",
    "invalid configuration argument",
    "invalid resource handle",
    "invalid device function",
    "invalid device ordinal",
    "no kernel image is available",
    "too many resources requested for launch",
    "peer access",
    "captur",  # every error of the capture of a graph
    "operation not supported",
    "cublas_status_invalid_value",
    "cublas_status_not_supported",
)


def sort_error(error: BaseException) -> TandemError | None:
    """The `TandemError` behind an exception of a step; None if the exception says nothing about the device.

    A `TandemError` is returned as it is. The caller raises the result `from error`.
    """
    for found in _with_causes(error):
        if isinstance(found, TandemError):
            return found
        of_device = _sort_one(found)
        if of_device is not None:
            return of_device
    return None


def sorted_error(error: Exception) -> Exception:
    """The `TandemError` behind an exception of a step on a device, else the exception itself."""
    return sort_error(error) or error


def _sort_one(error: BaseException) -> TandemError | None:
    text = str(error)
    first_line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfDeviceMemory(first_line)
    lowered = text.lower()
    is_accelerator = isinstance(error, torch.AcceleratorError)
    if not is_accelerator and not (
        isinstance(error, RuntimeError) and any(prefix in lowered for prefix in _DEVICE_PREFIXES)
    ):
        return None
    if any(sign in lowered for sign in _NO_MEMORY):
        return OutOfDeviceMemory(first_line)
    if any(sign in lowered for sign in _REFUSED):
        return None
    return DeviceLost(f"the device is lost: {first_line}")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those it was raised from. An exception raised while another was handled counts, too."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
