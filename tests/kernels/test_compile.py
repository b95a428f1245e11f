"""Ahead-of-time compilation for sm_90: every kernel builds for an H100, within its shared memory, without spills.

All variants, some minutes: `python -m tools.compile_kernels --all`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.gpu.kernels import KERNELS
from model_files.catalogue import default_cache_dir
from tools.kernel_variants import variants

pytestmark = pytest.mark.timeout(600)  # the first test may compile: 40 s of CPU, on two cores

MAX_SHARED_BYTES = 227 << 10  # of a program on Hopper


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Triton's cache has each kernel by its source, its options and the compiler: what changed is compiled again."""
    environment = dict(os.environ, TRITON_CACHE_DIR=str(default_cache_dir() / "triton"))
    del environment["TRITON_INTERPRET"]
    finished = subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", "--jobs", "2"],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(json.loads(finished.stdout))


def test_every_kernel_has_a_variant_that_ci_compiles(compiled: list[dict[str, Any]]) -> None:
    chosen = {variant.name for variant in variants() if variant.in_ci}
    assert {kernel["variant"] for kernel in compiled} == chosen
    assert {name.split()[0] for name in chosen} == KERNELS.keys()


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in compiled if kernel["stack_bytes"] or kernel["local_bytes"]] == []


def test_every_kernel_fits_in_shared_memory(compiled: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in compiled if kernel["shared_bytes"] > MAX_SHARED_BYTES] == []


def test_kernels_use_the_instructions_that_their_variants_name(compiled: list[dict[str, Any]]) -> None:
    """An instruction counts if any kernel of the variant has it."""
    lacking: dict[str, set[str]] = {}
    for kernel in compiled:
        missing = set(kernel["missing"])
        lacking[kernel["variant"]] = lacking.get(kernel["variant"], missing) & missing
    assert {variant: missing for variant, missing in lacking.items() if missing} == {}
