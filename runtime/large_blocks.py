"""Gives the memory of a client's body back to the system as soon as nothing refers to it."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
LARGE_BYTES = 256 * 1024


def give_large_blocks_back() -> None:
    """Have the allocator map each block of `LARGE_BYTES` or more by itself, and unmap it when it is freed.

    glibc does so from 128 KiB on, but the first freed block of n bytes raises that limit to n, up to 32 MiB. Then
    bodies of megabytes lie in the heap, and small objects behind them keep it large. Call it once in a process that
    takes bodies from clients. Not in a worker: each tensor of a step would be mapped anew. Other C libraries have no
    such limit, and nothing happens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
