"""In CI a skipped test fails, unless its reason is on the list of tests/conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

def test_without_compiler():
    pytest.skip("no C compiler here")

@pytest.mark.skipif(True, reason="network namespaces need root")
def test_without_root(): pass

@pytest.mark.xfail(reason="known")
def test_known(): assert False
"""


def run_pytest(folder: Path, tests: str, ci: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_skipping.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CI": ci}, timeout=60, check=False)
    return done.stdout


def test_a_skip_that_is_not_on_the_list_fails_in_ci_and_says_so(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, TESTS, ci="1")
    assert "1 failed, 1 skipped, 1 xfailed" in out
    assert "tests/conftest.py does not allow: no C compiler here" in out


def test_outside_ci_a_test_may_be_skipped_for_any_reason(tmp_path: Path) -> None:
    assert "2 skipped, 1 xfailed" in run_pytest(tmp_path, TESTS, ci="")


def test_a_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, "import pytest\npytest.importorskip('ucxx_nowhere')\ndef test_it(): pass\n", ci="1")
    assert "1 error" in out
