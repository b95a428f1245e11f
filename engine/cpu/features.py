"""The features of this machine's CPU."""

from __future__ import annotations

from pathlib import Path

# Names of bfloat16 products in /proc/cpuinfo (x86, x86, ARM). Without such instructions float32 is faster.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")
_ZEN_5_FAMILY = 26


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The first CPU's features as /proc/cpuinfo names them. Empty where there is no such file."""
    first = _first_cpu(cpuinfo)
    return frozenset((first.get("flags") or first.get("Features", "")).split())


def cpu_waits_for_many_lines(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU's first cache waits for as many lines of memory at once as its second: AMD's from Zen 5 on.

    False where there is no such file. Measured with paged attention, docs/performance.md.
    """
    first = _first_cpu(cpuinfo)
    return first.get("vendor_id") == "AuthenticAMD" and int(first.get("cpu family", "0")) >= _ZEN_5_FAMILY


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    """The first CPU's lines of /proc/cpuinfo, as name and value. Empty where there is no such file."""
    if not cpuinfo.is_file():
        return {}
    lines = cpuinfo.read_text().strip().partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has instructions for bfloat16 products. False where there is no such file."""
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def cpu_has_amx_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU multiplies tiles of bfloat16, which oneDNN uses for torch's products and attention."""
    return "amx_bf16" in cpu_flags(cpuinfo)
