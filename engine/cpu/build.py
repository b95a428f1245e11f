"""Compiles the C kernels for this CPU, once per machine, and keeps the library in the cache directory.

    sources + flags + compiler's version  -- hash -->  <cache>/native/<target>-<hash>.so

A finished library is renamed into place, so concurrent builds are safe and no process loads an incomplete file. The
last bytes of the file are a digest of the others. A file with a wrong digest is compiled again: a crash of the machine
may truncate a file, and loading such a library kills the process. Objects are compiled with OpenMP and linked without
an OpenMP library: the symbols resolve to the OpenMP library that torch has loaded, so the kernels and torch share one
set of threads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 120.0
_DIGEST_BYTES = 32  # the loader ignores bytes behind the last section


class NativeUnavailable(Exception):
    """No kernels for this machine; the message says why."""


class CompilerFailed(NativeUnavailable):
    """The compiler refused a source. An old compiler may not know the target."""


@dataclass(frozen=True, slots=True)
class Target:
    """One instruction set to compile for."""

    name: str
    cpu_flags: frozenset[str]  # flags that /proc/cpuinfo must list
    compiler_flags: tuple[str, ...]
    lanes: int  # floats in a vector; rows are read two vectors at a time


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_AVX512_BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")  # every CPU with avx512_bf16 has avx512_vnni
AMX = frozenset({"amx_tile", "amx_bf16"})


def _x86(name: str, lanes: int, *features: str) -> Target:
    """Compiler flags spell the features of /proc/cpuinfo -mavx512bf16 and -mamx-bf16."""
    spelled = (feature.replace("avx512_", "avx512").replace("_", "-") for feature in features)
    return Target(name, frozenset(features), tuple(f"-m{feature}" for feature in spelled), lanes)


# Best first. The generic target uses the compiler's default vectors on any architecture.
TARGETS = (
    _x86("amx", 16, *_AVX512_BF16, *sorted(AMX)),
    _x86("avx512_bf16", 16, *_AVX512_BF16),
    _x86("avx512", 16, *_AVX512),
    _x86("avx2", 8, "avx2", "fma"),
    Target("generic", frozenset(), (), 8),
)


def fitting_targets(cpu_flags: frozenset[str], head_dim: int) -> list[Target]:
    """The targets for this CPU and head size, best first. Raises `NativeUnavailable` if there is none."""
    fitting = [target for target in TARGETS if target.cpu_flags <= cpu_flags and head_dim % (2 * target.lanes) == 0]
    if not fitting:
        raise NativeUnavailable(f"the kernels do not support heads of {head_dim}, only multiples of 16")
    return fitting


def find_compiler() -> Path:
    for name in COMPILERS:
        if found := shutil.which(name):
            return Path(found)
    raise NativeUnavailable(f"no C compiler found (looked for {', '.join(COMPILERS)})")


def build(target: Target, cache_dir: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The shared library for `target`, from the cache or compiled. Raises `NativeUnavailable`, or its subclass
    `CompilerFailed` if a source does not compile."""
    compiler = find_compiler()
    flags = (*FLAGS, *target.compiler_flags, f"-DLANES={target.lanes}", *extra_flags)
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256()
    for part in (_run([compiler, "--version"]), " ".join(flags)):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    directory = cache_dir / "native"
    library = directory / f"{target.name}-{digest.hexdigest()[:16]}.so"
    try:
        if _is_whole(library):
            return library
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as scratch:
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
            for source, compiled in zip(sources, objects, strict=True):
                _run([compiler, *flags, "-c", source, "-o", compiled])
            linked = Path(scratch) / library.name
            _run([compiler, "-shared", *extra_flags, *objects, "-lm", "-o", linked])
            content = linked.read_bytes()
            linked.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(linked, library)
    except OSError as error:
        raise NativeUnavailable(f"cannot use {directory} ({error})") from error
    return library


def _is_whole(library: Path) -> bool:
    if not library.is_file():
        return False
    stored = library.read_bytes()
    return stored[-_DIGEST_BYTES:] == hashlib.sha256(stored[:-_DIGEST_BYTES]).digest()


def _run(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C compiler did not run: {error}") from error
    if done.returncode != 0:
        raise CompilerFailed(f"{command[0]} failed: {' '.join(done.stderr.split())[-500:]}")
    return done.stdout
