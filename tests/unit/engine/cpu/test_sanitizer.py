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


def targets() -> list[Target]:
    """The best target of each vector width that this CPU runs, and AMX's tiles in plain C: the sanitizer does not see
    what tile instructions access."""
    here = targets_here()
    widths = dict.fromkeys(target.lanes for target in here)
    return [*(next(target for target in here if target.lanes == lanes) for lanes in widths), portable_tiles()]


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_no_kernel_accesses_memory_out_of_bounds_and_the_sanitizer_would_see_it(target: Target) -> None:
    need_compiler()
    found = subprocess.run(
        [find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no libasan")
    library = build(target, default_cache_dir(), SANITIZER)
    program = Path(kernel_cases.__file__)
    done = subprocess.run(
        [sys.executable, program, library],
        env=os.environ
        | {
            "LD_PRELOAD": f"{os.path.realpath(found)} {os.environ.get('LD_PRELOAD', '')}",  # first, else nothing loads
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=23",  # the leaks are Python's own
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(program.parents[4]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.count("comparisons within") == len(kernel_cases.TOLERANCE), done.stdout + done.stderr[-3000:]
    assert done.returncode == 23, "the write at the end of the program was not seen"
    assert done.stderr.count("ERROR: AddressSanitizer") == 1
    assert "tandem_silu_and_multiply" in done.stderr
