"""CudaDeviceMemory on the host: the operators' references in place of kernels, a table in place of the driver."""

from __future__ import annotations

import ctypes
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from core.errors import DeviceLost, TransportError
from engine.gpu import cuda_driver, device_memory
from engine.gpu.cuda_driver import Allocation, CudaDriver
from engine.gpu.device_memory import CudaDeviceMemory
from tests.support.c_kernels import need_compiler

BLOCKS, SHAPE = 6, (2, 2, 1, 4, 8)
BLOCK_BYTES = 2 * 2 * 4 * 8 * 4


class FakeDriver:
    """The allocations of several processes, by handle. A pool begins 512 bytes into its allocation."""

    def __init__(self) -> None:
        self.exported: dict[bytes, int] = {}
        self.open_bases: list[int] = []
        self.entered: list[int] = []
        self.refuses = False

    def enter(self, device: int) -> None:
        self.entered.append(device)

    def allocation_of(self, address: int) -> Allocation:
        return Allocation(address - 512, 1 << 20)

    def export(self, base: int) -> bytes:
        if self.refuses:
            raise TransportError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE (1)")
        handle = base.to_bytes(64, "little")
        self.exported[handle] = base
        return handle

    def open(self, handle: bytes) -> int:
        self.open_bases.append(self.exported[handle])
        return self.exported[handle]

    def close(self, base: int) -> None:
        self.open_bases.remove(base)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(autouse=True)
def _forget_exports() -> Iterator[None]:
    yield
    device_memory._exported.clear()


def memory_of(driver: FakeDriver) -> tuple[torch.Tensor, CudaDeviceMemory]:
    pool = torch.randn(BLOCKS, *SHAPE)
    return pool, CudaDeviceMemory(pool, driver, probe_bytes=1 << 20)


def in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_THIS_PROCESS", uuid.uuid4().bytes)


def test_blocks_of_a_mapped_peer_arrive(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, peer = memory_of(driver)
    handle = peer.export()
    in_another_process(monkeypatch)
    ours, memory = memory_of(driver)
    expected = ours.clone()
    expected[[5, 0, 1]] = theirs[[2, 3, 4]]

    base = memory.map(handle)
    copies = [
        (base + source * BLOCK_BYTES, ours.data_ptr() + target * BLOCK_BYTES, BLOCK_BYTES)
        for source, target in ((2, 5), (3, 0), (4, 1))
    ]
    started = memory.start_copies(copies)

    assert base == theirs.data_ptr()
    assert memory.has_ended(started)
    assert torch.equal(ours, expected)
    assert driver.open_bases == [base - 512]
    memory.unmap(base)
    assert driver.open_bases == []


def test_a_pool_that_is_mapped_twice_is_closed_twice(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = memory_of(driver)[1].export()
    in_another_process(monkeypatch)
    memory = memory_of(driver)[1]
    first, second = memory.map(handle), memory.map(handle)
    assert first == second
    memory.unmap(first)
    assert len(driver.open_bases) == 1
    memory.unmap(second)
    assert driver.open_bases == []


def test_a_pool_of_the_same_process_needs_no_driver(driver: FakeDriver) -> None:
    pool, memory = memory_of(driver)
    address = memory.map(memory.export())
    assert address == pool.data_ptr()
    memory.unmap(address)
    assert driver.open_bases == []


def test_a_pool_that_cannot_be_exported_names_the_setting(driver: FakeDriver) -> None:
    memory = memory_of(driver)[1]
    driver.refuses = True
    with pytest.raises(TransportError, match=r"CUDA_ERROR_INVALID_VALUE.*expandable_segments"):
        memory.export()


def test_an_end_is_told_once(driver: FakeDriver) -> None:
    memory = memory_of(driver)[1]
    handle = memory.start_copies([])
    assert memory.has_ended(handle)
    with pytest.raises(KeyError):
        memory.has_ended(handle)


def test_a_copy_that_has_not_ended_does_not_wait(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(driver)[1]
    handle = memory.start_copies([])
    ended = [False, False, True]
    monkeypatch.setattr(memory._in_flight[handle], "has_ended", lambda: ended.pop(0), raising=False)
    assert [memory.has_ended(handle) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: invalid argument", TransportError),
        ("CUDA error: out of memory", TransportError),
        ("CUDA error: an illegal memory access was encountered", DeviceLost),
    ],
)
def test_an_error_of_the_device_fails_the_copy_and_a_lost_device_the_agent(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    memory = memory_of(driver)[1]

    def fail(*_: object) -> None:
        raise torch.AcceleratorError(text)

    monkeypatch.setattr(memory._copying, "mark", fail)
    with pytest.raises(kind, match=text):
        memory.start_copies([])


@pytest.mark.parametrize("max_sums_bytes", [device_memory._MAX_SUMS_BYTES, 128])
def test_digests_are_those_of_xxhash(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, max_sums_bytes: int) -> None:
    """In one launch, and in several."""
    monkeypatch.setattr(device_memory, "_MAX_SUMS_BYTES", max_sums_bytes)
    pool, memory = memory_of(driver)
    blocks = [4, 0, 5, 4]
    assert memory.digests(blocks, BLOCK_BYTES) == tuple(
        xxhash.xxh3_64_intdigest(pool[block].numpy().tobytes()) for block in blocks
    )
    assert memory.digests([], BLOCK_BYTES) == ()


def test_making_it_measures_copies_and_leaves_the_pool_as_it_is(driver: FakeDriver) -> None:
    pool = torch.randn(BLOCKS, *SHAPE)
    before = pool.clone()
    memory = CudaDeviceMemory(pool, driver, probe_bytes=1 << 20)
    assert torch.equal(pool, before)
    assert memory.copy_bytes_per_s > 1e6
    assert (memory.device, memory.uuid) == (0, "")
    assert driver.entered == []


# ---- CudaDriver calls a library with the types of cuda.h. The library is a small one, compiled here.

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
