"""Under AddressSanitizer, the kernels read and write only the memory of their arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cpu.build import Target, build, find_compiler
from model_files.catalogue import default_cache_dir
from tests.support.c_kernels import need_compiler, portable_tiles, targets_here
from tests.unit.engine.cpu import kernel_cases

SANITIZER = ("-fsanitize=address", "-g", "-O1")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of a process that loads a library compiled for the sanitizer."""
    need_compiler()
    found = subprocess.run(
        [find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no libasan")
    options = "detect_leaks=0:abort_on_error=0:exitcode=23"  # the sanitizer reports Python's own leaks
    return os.environ | {"LD_PRELOAD": os.path.realpath(found), "ASAN_OPTIONS": options, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"PYTHONPATH": str(Path(kernel_cases.__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def targets() -> list[Target]:
    """The best target of each vector width that this CPU runs, and AMX's tiles in plain C: the sanitizer does not see
    what tile instructions access."""
    here = targets_here()
    widths = dict.fromkeys(target.lanes for target in here)
    return [*(next(target for target in here if target.lanes == lanes) for lanes in widths), portable_tiles()]


@pytest.fixture(scope="module", params=targets(), ids=lambda target: target.name)
def library(request: pytest.FixtureRequest, environment: dict[str, str]) -> Path:
    assert environment["LD_PRELOAD"], "else the library would not load"
    return build(request.param, default_cache_dir(), SANITIZER)


def test_no_kernel_accesses_memory_out_of_bounds(environment: dict[str, str], library: Path) -> None:
    done = run(environment, str(kernel_cases.__file__), str(library))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("comparisons within") == len(kernel_cases.TOLERANCE)


def test_the_sanitizer_detects_a_write_out_of_bounds(environment: dict[str, str], library: Path) -> None:
    """Otherwise the test above would prove nothing."""
    program = (
        "import sys, torch; from pathlib import Path; from engine.cpu.kernels import Kernels\n"
        "rows, out = torch.ones(4, 64), torch.empty(4, 31)\n"
        "Kernels(Path(sys.argv[1])).silu_and_multiply(rows.data_ptr(), out.data_ptr(), 4, 32, 0, 1)\n"
    )
    done = run(environment, "-c", program, str(library))
    assert done.returncode == 23
    assert "ERROR: AddressSanitizer" in done.stderr
    assert "tandem_silu_and_multiply" in done.stderr
