"""The features of this machine's CPU."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

# Names of bfloat16 products in /proc/cpuinfo (x86, x86, ARM). Without such instructions float32 is faster.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")
_ZEN_5_FAMILY = 26
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The first CPU's features as /proc/cpuinfo names them. Empty without that file."""
    first = _first_cpu(cpuinfo)
    return frozenset((first.get("flags") or first.get("Features", "")).split())


def has_many_l1_miss_buffers(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU's L1 has as many miss buffers as its L2: AMD's from Zen 5 on.

    False without /proc/cpuinfo. Measured with paged attention, docs/figures/engine.md.
    """
    first = _first_cpu(cpuinfo)
    return first.get("vendor_id") == "AuthenticAMD" and int(first.get("cpu family", "0")) >= _ZEN_5_FAMILY


def widens_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether widening bfloat16 to float32 is faster than vdpbf16ps, which Intel's CPUs issue every second cycle."""
    return _first_cpu(cpuinfo).get("vendor_id") == "GenuineIntel"


def request_tiles() -> bool:
    """Ask Linux for AMX's tile registers, for this process and its later children. May be asked again.

    False if refused, as by Linux before 5.16 and by some sandboxes: then a tile instruction ends the process.
    """
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None)
    return int(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)) == 0


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    """The first CPU's lines of /proc/cpuinfo, as name and value. Empty without that file."""
    if not cpuinfo.is_file():
        return {}
    lines = cpuinfo.read_text().strip().partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has instructions for bfloat16 products. False without /proc/cpuinfo."""
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))
