"""What this machine's CPU can do."""

from __future__ import annotations

from pathlib import Path

# What /proc/cpuinfo calls a CPU's own bfloat16 products (x86, x86, ARM); without them float32 is the faster one.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")
_ZEN_5_FAMILY = 26


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The first CPU's features as /proc/cpuinfo names them. Empty where it cannot be told."""
    first = _first_cpu(cpuinfo)
    return frozenset((first.get("flags") or first.get("Features", "")).split())


def cpu_waits_for_many_lines(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU's first cache waits for as many lines of memory at once as its second: AMD's from Zen 5 on.

    False where it cannot be told. Measured by paged attention, docs/performance.md.
    """
    first = _first_cpu(cpuinfo)
    return first.get("vendor_id") == "AuthenticAMD" and int(first.get("cpu family", "0")) >= _ZEN_5_FAMILY


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    """What /proc/cpuinfo says of the first CPU, before the empty line. Empty where there is no such file."""
    if not cpuinfo.is_file():
        return {}
    lines = cpuinfo.read_text().strip().partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has instructions for bfloat16 products. False where it cannot be told."""
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def cpu_has_amx_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU multiplies tiles of bfloat16, which oneDNN uses for torch's products and attention."""
    return "amx_bf16" in cpu_flags(cpuinfo)
