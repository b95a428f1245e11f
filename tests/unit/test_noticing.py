"""What the tests themselves notice: a container that grows, and a skip that CI does not allow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.live_objects import count_live, growth


class KeepsRequests:
    """Counted under a name of this test alone: the process may still be freeing objects of earlier tests."""

    __module__ = "core"

    def __init__(self) -> None:
        self._by_id: dict[int, float] = {}


def test_a_container_that_keeps_its_elements_is_named() -> None:
    keeper = KeepsRequests()
    before = count_live()
    for request_id in range(50):
        keeper._by_id[request_id] = 1.0
    assert growth(before, count_live()) == {"core.KeepsRequests._by_id": 50}
    keeper._by_id.clear()
    assert growth(before, count_live()) == {}


# ---- in CI a skipped test fails, unless its reason is on the list of tests/conftest.py

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
MODULE = "import pytest\npytest.importorskip('ucxx_nowhere')\ndef test_it(): pass\n"


def test_a_test_or_module_whose_skip_is_not_on_the_list_fails_in_ci_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_skipping.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CI": "1"}, timeout=60)
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in done.stdout
    assert "tests/conftest.py does not allow: no C compiler here" in done.stdout
