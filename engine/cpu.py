"""What this machine's CPU can do."""

from __future__ import annotations

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
