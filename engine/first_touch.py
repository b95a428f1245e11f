"""First touch of fresh memory, before the memory is needed: the first write costs fifteen times a later one.

Where a hypervisor has to find the memory, half a gigabyte takes more than a second. So the start touches only the first
blocks. A thread of the lowest priority touches the rest later.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading

import torch

AT_ONCE_BYTES = 64 << 20
_STEP_BYTES = 2 << 20  # a thread that maps memory meanwhile waits for one step at most
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14: as if every page were written, and none changes
_LOWEST_PRIORITY = 19

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def touch(memory: torch.Tensor, at_once_bytes: int = AT_ONCE_BYTES) -> torch.Tensor:
    """Touch the first bytes. Returns the others, empty where there are none or the kernel is too old.

    `memory` is whole pages of zeros, uint8.
    """
    if _populate(memory[:at_once_bytes]):
        return memory[at_once_bytes:]
    memory.zero_()
    return memory[:0]


def touch_meanwhile(memory: torch.Tensor) -> threading.Thread:
    """Touch the rest that `touch` returned, in a thread. Any thread may read and write that memory meanwhile."""
    thread = threading.Thread(target=_touch_rest, args=(memory,), name="tandem-first-touch", daemon=True)
    thread.start()
    return thread


def _touch_rest(memory: torch.Tensor) -> None:
    with contextlib.suppress(OSError):  # a normal priority only slows the threads that compute
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    # The last pieces first: peers probe them when they connect (kv_transfer/path_probe.py).
    pieces = memory.split(_STEP_BYTES)
    for piece in (*pieces[-2:], *pieces[:-2]):
        if not _populate(piece):
            _log.warning("memory was not touched ahead: %s", os.strerror(ctypes.get_errno()))
            return


def _populate(memory: torch.Tensor) -> bool:
    """Releases the GIL."""
    address, num_bytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory))
    return bool(_libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)
