"""Touches fresh memory before its first use, because the first write to a page costs fifteen times a later write.

If a hypervisor must first allocate the memory, half a gigabyte takes more than a second. Startup therefore touches only
the first blocks. A thread of the lowest priority touches the rest later.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading

import torch

FIRST_BYTES = 64 << 20
_STEP_BYTES = 2 << 20  # another thread that maps memory waits for at most one step
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14: faults every page in for writing and changes no byte
_LOWEST_PRIORITY = 19

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def touch_first(memory: torch.Tensor, first_bytes: int = FIRST_BYTES) -> torch.Tensor:
    """Touch the first bytes and return the rest. On an old Linux kernel, touch everything and return an empty tensor.

    `memory` is whole pages of zeros, uint8.
    """
    if _populate(memory[:first_bytes]):
        return memory[first_bytes:]
    memory.zero_()
    return memory[:0]


def touch_in_background(memory: torch.Tensor) -> threading.Thread:
    """Touch the memory in a thread. Other threads may read and write the memory at the same time."""
    thread = threading.Thread(target=_touch_rest, args=(memory,), name="tandem-first-touch", daemon=True)
    thread.start()
    return thread


def _touch_rest(memory: torch.Tensor) -> None:
    with contextlib.suppress(OSError):  # with normal priority, the thread only slows computation
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    # The last pieces come first: peers probe them when they connect (kv_transfer/path_probe.py).
    pieces = memory.split(_STEP_BYTES)
    for piece in (*pieces[-2:], *pieces[:-2]):
        if not _populate(piece):
            _log.warning("cannot touch memory ahead of its use: %s", os.strerror(ctypes.get_errno()))
            return


def _populate(memory: torch.Tensor) -> bool:
    """Releases the GIL."""
    address, num_bytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory))
    return bool(_libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)
