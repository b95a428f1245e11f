"""CudaDriver calls a library with the types of cuda.h. The library is a small one, compiled here."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from core.errors import DeviceLost, TransportError
from engine.gpu import cuda_driver
from engine.gpu.cuda_driver import Allocation, CudaDriver
from tests.support.c_kernels import need_compiler

# The declarations are those of cuda.h. An allocation is at 0x7f0000000000 and has 4096 bytes.
SOURCE = r"""
#include <stddef.h>
#include <string.h>
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700 };
static const CUdeviceptr BASE = 0x7f0000000000ULL;
static int context, num_retained;
static void *current;

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 100; return ordinal > 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) {
    num_retained++; *found = &context; return device < 100 ? INVALID_VALUE : 0; }
int cuCtxSetCurrent(void *given) { current = given; return given == &context ? 0 : INVALID_CONTEXT; }
int cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    if (!current) return INVALID_CONTEXT;
    if (address < BASE || address >= BASE + 4096) return INVALID_VALUE;
    *base = BASE; *size = 4096; return 0; }
int cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    memset(handle, 0, sizeof *handle); memcpy(handle->reserved + 1, &address, sizeof address);
    handle->reserved[63] = 'z'; return address == BASE ? 0 : INVALID_VALUE; }
int cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[63] != 'z') return INVALID_VALUE;
    memcpy(address, handle.reserved + 1, sizeof *address); *address += 65536; return 0; }
int cuIpcCloseMemHandle(CUdeviceptr address) {
    return address == BASE + 65536 ? 0 : address ? INVALID_VALUE : ILLEGAL_ADDRESS; }
int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_INVALID_CONTEXT"; return 0; }
int retained(void) { return num_retained; }
"""
BASE = 0x7F0000000000


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    need_compiler()
    (tmp_path / "driver.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "driver.so", tmp_path / "driver.c"], check=True)
    return ctypes.CDLL(str(tmp_path / "driver.so"))


def test_an_exported_allocation_opens_at_another_address(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    driver.enter(3)
    driver.enter(3)
    assert library.retained() == 1
    assert driver.allocation_of(BASE + 100) == Allocation(BASE, 4096)
    handle = driver.export(BASE)
    assert len(handle) == cuda_driver.IPC_HANDLE_BYTES
    assert driver.open(handle) == BASE + 65536
    driver.close(BASE + 65536)


def test_a_failed_call_names_itself_and_the_error(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    with pytest.raises(TransportError, match=r"cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_CONTEXT \(201\)"):
        driver.allocation_of(BASE)
    driver.enter(0)
    with pytest.raises(TransportError, match=r"cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.open(bytes(64))


def test_an_error_that_all_later_calls_repeat_is_a_lost_device(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    driver.enter(0)
    with pytest.raises(DeviceLost, match=r"cuIpcCloseMemHandle: .* \(700\)"):
        driver.close(0)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-is-not-here.so.1")
    cuda_driver.load_driver.cache_clear()
    with pytest.raises(TransportError, match="no CUDA driver: libcuda-is-not-here"):
        cuda_driver.load_driver()
