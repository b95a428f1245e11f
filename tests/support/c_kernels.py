"""The C kernels for tests. Only a machine without a C compiler skips: kernels that do not compile are a failure."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from engine.cpu.build import TARGETS, Target
from engine.cpu.kernels import Kernels, load_kernels, usable_flags
from model_files.catalogue import default_cache_dir


def need_compiler() -> None:
    """Skip the test without a C compiler. Does not use the engine's own search, which may be broken."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler on this machine")


def targets_here() -> list[Target]:
    """The targets whose instructions this process may use, best first."""
    return [target for target in TARGETS if target.cpu_flags <= usable_flags()]


def portable_tiles() -> Target:
    """The kernels of AMX's tiles in plain C, for any CPU. Compiled with -O1, because -O3 takes minutes."""
    narrow = next(target for target in targets_here() if target.lanes == 8)
    flags = (*narrow.compiler_flags, "-DPORTABLE_TILES", "-O1")
    return replace(narrow, name=f"{narrow.name}-tiles", lanes=16, compiler_flags=flags)


def need_kernels() -> Kernels:
    """The kernels that a worker loads on this machine for heads of 64."""
    need_compiler()
    kernels = load_kernels(64, default_cache_dir())
    assert kernels is not None, "the C compiler is there, but the kernels did not load: see the log"
    return kernels
