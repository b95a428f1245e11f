"""A name for this process in its pid namespace, and whether a process with such a name has died."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def own_process(proc: Path = PROC) -> str:
    """Empty where /proc is missing: then no other process can tell whether this one has died."""
    started = _started(proc, os.getpid())
    return f"{_namespace(proc)} {os.getpid()} {started}" if started else ""


def has_died(process: str, proc: Path = PROC) -> bool:
    """False where the process is not visible from here."""
    namespace, _, rest = process.partition(" ")
    if not rest or namespace != _namespace(proc):
        return False
    pid, _, started = rest.partition(" ")
    return _started(proc, int(pid)) != started


def _namespace(proc: Path) -> str:
    try:
        return os.readlink(proc / "self/ns/pid")
    except OSError:
        return "-"


def _started(proc: Path, pid: int) -> str:
    """The time at which a process began, in ticks; empty if the process has ended or is a zombie."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
