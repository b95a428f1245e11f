"""Settings of all tests.

Hypothesis draws the same examples on every machine, and never times them. Some examples are constants of the modules
that are loaded, so a test that runs alone may see others than in a full run. With `--hypothesis-profile=explore`, a
random seed chooses the examples, or `--hypothesis-seed`; tools/explore.py runs the tests so.

Where the environment variable CI is set, a skipped test fails unless its reason is one of ALLOWED_SKIPS: what CI
installs must be tested there.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.support.scheduling import OneComputes

pytest.register_assert_rewrite("tests.support")  # a helper's failed assertion shows its values, as a test's does
settings.register_profile("tandem", derandomize=True, database=None, deadline=None)
settings.register_profile(
    "explore", derandomize=False, database=None, deadline=None, max_examples=1000, print_blob=True
)
settings.load_profile("tandem")
# A shell starts jobs in the background without SIGINT, and nohup without SIGHUP; children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Patterns of reasons -> why CI cannot do anything about them.
ALLOWED_SKIPS = {
    r"^other programs slow this machine": "a comparison of times says nothing there",
    r"network namespaces ": "containers seldom have root's rights over their network",
    r"^[ipt, c]+ not installed$": "images seldom have iproute2",
    r"AVX-512": "the CPU is what it is",
    r"no CUDA device": "CI has no GPU",
    r"huge pages": "the kernel's configuration is not the container's",
    r"two workers on one core": "the machine may have one core",
    r"^kubectl is too old": "Debian 12 has no newer one",
    r"over TCP": "a property of the transport under test",
}


# Files that take longest. A process begins with the first that is left of its kind. Those that start Ray stand apart.
LONG_FILES = (
    "tests/vllm/test_engine.py",
    "tests/integration/test_cli.py",
    "tests/faults/test_processes.py",
    "tests/faults/test_links.py",
    "tests/integration/test_two_nodes.py",
    "tests/integration/test_transports.py",
    "tests/integration/test_path_matrix.py",
    "tests/faults/test_several_routers.py",
    "tests/integration/test_two_pools.py",
    "tests/faults/test_soak.py",
    "tests/integration/test_gpu_placement.py",
    "tests/faults/test_routers.py",
    "tests/integration/test_cluster.py",
    "tests/integration/test_dashboard_page.py",
    "tests/integration/test_autoscaler.py",
    # These compute.
    "tests/simulation/test_seeds.py",
    "tests/property/test_fuzz.py",
    "tests/simulation/test_every_move_state.py",
    "tests/unit/engine/cpu/test_sanitizer.py",
    "tests/unit/engine/cpu/test_kernels.py",
    "tests/simulation/test_the_checks_can_fail.py",
    "tests/simulation/test_elastic.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {file: rank for rank, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneComputes | None:
    from tests.support.scheduling import OneComputes

    return OneComputes(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure() -> None:
    """The garbage collector would look through all modules and items again and again: it starts when they are there."""
    gc.disable()
    atexit.register(gc.unfreeze)  # libraries count what is left at the end of the process; pytest collects before


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def complaint(reason: str) -> str | None:
    """Why a skip with this reason fails; None where it may be skipped."""
    if not os.environ.get("CI") or any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS):
        return None
    return f"skipped in CI for a reason that tests/conftest.py does not allow: {reason}"


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    where = report.longrepr
    reason = where[2].removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)
    found = complaint(reason)
    if found is not None:
        report.outcome, report.longrepr = "failed", found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report)
    return report
