"""One-sided reads on the handles of a ucxx context, worker and endpoint: ucp_mem_map and ucp_get, by ctypes.

ucxx has no remote memory access in Python, but its handles are plain UCP pointers, and ucxx has loaded libucp. The
structures below are those of UCX 1.x (ucp/api/ucp.h), up to the last field that a mask names.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass

from core.errors import PeerDisconnected, TransportError

_IN_PROGRESS = 1
_GONE = {-25: "connection reset", -6: "unreachable", -80: "endpoint timeout", -16: "cancelled", -24: "not connected"}

_MAP_ADDRESS, _MAP_LENGTH, _MAP_MEMORY_TYPE = 1 << 0, 1 << 1, 1 << 4
_MEMORY_HOST, _MEMORY_CUDA = 0, 1
_ATTR_MEMH = 1 << 8


class _MapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", ctypes.c_void_p),
    )


class _RequestParams(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
    )


def _load() -> ctypes.CDLL:
    """The libucp that ucxx has loaded. Its calls release the interpreter's lock: a get may copy before it returns."""
    library = ctypes.CDLL("libucp.so.0")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("ucp_mem_map", ctypes.c_int, (pointer, pointer, pointer)),
        ("ucp_mem_unmap", ctypes.c_int, (pointer, pointer)),
        ("ucp_rkey_pack", ctypes.c_int, (pointer, pointer, pointer, pointer)),
        ("ucp_rkey_buffer_release", None, (pointer,)),
        ("ucp_ep_rkey_unpack", ctypes.c_int, (pointer, ctypes.c_char_p, pointer)),
        ("ucp_rkey_destroy", None, (pointer,)),
        ("ucp_get_nbx", ctypes.c_ssize_t, (pointer, pointer, size, ctypes.c_uint64, pointer, pointer)),
        ("ucp_request_check_status", ctypes.c_int, (pointer,)),
        ("ucp_request_free", None, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def failure(status: int, doing: str) -> TransportError:
    """The error for a status below 0."""
    if status in _GONE:
        return PeerDisconnected(f"{doing}: {_GONE[status]}")
    return TransportError(f"{doing}: UCX status {status}")


@dataclass(slots=True)
class RemoteKey:
    """A peer's permission to read its pool, bound to one endpoint."""

    endpoint: int
    handle: int


class UcpMemory:
    """Our pool, registered with one ucxx context. Raises `TransportError`."""

    def __init__(self, context: int, address: int, num_bytes: int, device: int | None) -> None:
        self._ucp = _load()
        self._context = context
        memory_type = _MEMORY_HOST if device is None else _MEMORY_CUDA
        mask = _MAP_ADDRESS | _MAP_LENGTH | _MAP_MEMORY_TYPE
        params = _MapParams(mask, address, num_bytes, 0, 0, memory_type, None)
        handle = ctypes.c_void_p()
        self._check(self._ucp.ucp_mem_map(context, ctypes.byref(params), ctypes.byref(handle)), "register the pool")
        self._memory = handle.value
        self._get_params = _RequestParams(op_attr_mask=_ATTR_MEMH, memh=self._memory)

    def packed_key(self) -> bytes:
        """The key for a peer's `unpack`."""
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self._ucp.ucp_rkey_pack(self._context, self._memory, ctypes.byref(buffer), ctypes.byref(size))
        self._check(status, "pack the pool's key")
        assert buffer.value is not None
        key = ctypes.string_at(buffer.value, size.value)
        self._ucp.ucp_rkey_buffer_release(buffer)
        return key

    def unpack(self, endpoint: int, packed: bytes) -> RemoteKey:
        """The peer's key, for reads over `endpoint`. The endpoint must be connected: only then are its lanes known."""
        handle = ctypes.c_void_p()
        self._check(self._ucp.ucp_ep_rkey_unpack(endpoint, packed, ctypes.byref(handle)), "unpack the peer's key")
        assert handle.value is not None
        return RemoteKey(endpoint, handle.value)

    def forget(self, key: RemoteKey) -> None:
        self._ucp.ucp_rkey_destroy(key.handle)

    def get(self, key: RemoteKey, runs: deque[tuple[int, int, int]], requests: deque[int], most: int) -> None:
        """Start to read runs (the peer's address, ours, bytes) while fewer than `most` requests are in flight.

        Takes runs from the left, and appends a request for each read that has not ended at once.
        """
        start, params = self._ucp.ucp_get_nbx, ctypes.byref(self._get_params)
        endpoint, handle = key.endpoint, key.handle
        while runs and len(requests) < most:
            source, target, num_bytes = runs.popleft()
            pointer = start(endpoint, target, num_bytes, source, handle, params)
            if pointer > 0:
                requests.append(pointer)
            elif pointer < 0:
                raise failure(pointer, "read")

    def forget_ended(self, requests: deque[int]) -> int:
        """Remove ended requests from the left, up to one that has failed. Returns its status, 0 where none has failed.

        It checks only the oldest request, since requests end about in order, and all must end.
        """
        check, free = self._ucp.ucp_request_check_status, self._ucp.ucp_request_free
        while requests and (status := check(requests[0])) != _IN_PROGRESS:
            free(requests.popleft())
            if status:
                return int(status)
        return 0

    def close(self) -> None:
        self._check(self._ucp.ucp_mem_unmap(self._context, self._memory), "close the pool")

    def _check(self, status: int, doing: str) -> None:
        if status < 0:
            raise failure(status, doing)
