"""The calls of the CUDA driver that torch does not offer: maps of another process's allocation.

Source: the section "Memory Management" of the CUDA driver API. The driver's library has one name in every version.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from core.errors import DeviceLost, TransportError

_LIBRARY = "libcuda.so.1"
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the pool may be on another GPU
IPC_HANDLE_BYTES = 64

# The errors of cuda.h after which the process has no device: the driver ends, a memory error of the hardware, a context
# that is destroyed, and everything that a kernel can do wrong.
_LOST = frozenset({4, 214, 220, 700, 702, 709, 710, *range(714, 720)})


class Allocation(NamedTuple):
    base: int
    num_bytes: int


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class CudaDriver:
    """Raises `TransportError` where a call fails, and `DeviceLost` where all later calls will.

    Each thread must call `enter` before its other calls.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        address, unsigned = ctypes.c_uint64, ctypes.c_uint
        library.cuInit.argtypes = [unsigned]
        library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
        library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
        library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
        library.cuMemGetAddressRange_v2.argtypes = [
            ctypes.POINTER(address), ctypes.POINTER(ctypes.c_size_t), address,
        ]  # fmt: skip
        library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), address]
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _IpcHandle, unsigned]
        library.cuIpcCloseMemHandle.argtypes = [address]
        library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self._contexts: dict[int, int] = {}  # primary contexts, by device

    def enter(self, device: int) -> None:
        """Make the primary context of `device`, which torch uses, the current one of this thread."""
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context.value or 0
        self._call("cuCtxSetCurrent", self._contexts[device])

    def allocation_of(self, address: int) -> Allocation:
        """The allocation that `address` is in."""
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), address)
        return Allocation(base.value, num_bytes.value)

    def export(self, base: int) -> bytes:
        """A handle of the allocation at `base`, for `open` in another process."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map the allocation of another process. Its GPU need not be among those that this process sees."""
        base = ctypes.c_uint64()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, _LAZY_ENABLE_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", base)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            found = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(found))
            kind = DeviceLost if status in _LOST else TransportError
            raise kind(f"{name}: {(found.value or b'unknown error').decode()} ({status})")


@functools.cache
def load_driver() -> CudaDriver:
    """Raises `TransportError` without a CUDA driver."""
    try:
        return CudaDriver(ctypes.CDLL(_LIBRARY))
    except OSError as error:
        raise TransportError(f"no CUDA driver: {error}") from error
