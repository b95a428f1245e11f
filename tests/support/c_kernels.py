"""The C kernels for tests. Only a machine without a C compiler skips: kernels that do not compile are a failure."""

from __future__ import annotations

import shutil

import pytest

from engine.cpu.kernels import Kernels, load_kernels
from model_files.catalogue import default_cache_dir


def need_compiler() -> None:
    """Skip the test without a C compiler. Does not use the engine's own search, which may be broken."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler on this machine")


def need_kernels() -> Kernels:
    """The kernels that a worker loads on this machine for heads of 64."""
    need_compiler()
    kernels = load_kernels(64, default_cache_dir())
    assert kernels is not None, "the C compiler is there, but the kernels did not load: see the log"
    return kernels
