"""What this machine's CPU can do."""

from __future__ import annotations

import ctypes
from pathlib import Path

# What /proc/cpuinfo calls a CPU's own bfloat16 products (x86, x86, ARM); without them float32 is the faster one.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The first CPU's features as /proc/cpuinfo names them. Empty where it cannot be told."""
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has instructions for bfloat16 products. False where it cannot be told."""
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def cpu_has_amx_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU multiplies bfloat16 tiles, which torch's own attention uses for long chunks."""
    return "amx_bf16" in cpu_flags(cpuinfo)


_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux's headers for x86-64


def permit_tiles() -> bool:
    """Asks Linux to let this process use the CPU's tiles. False where it does not, or there are none."""
    if not cpu_has_amx_bf16():
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)))) == 0


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, for the whole process. False where the C library has no such setting.

    A step allocates and frees a few tens of MB. Off the main thread glibc gives much of it back each time, and the next
    layer pays for the pages again: 43,000 page faults were seen in a prefill of 1,900 tokens, 6 % of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, _KEPT_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
