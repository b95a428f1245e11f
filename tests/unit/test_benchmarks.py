"""Each benchmark starts; ratios and verdicts follow from what was measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.engine.figures import VLLM
from benchmarks.report import Line, Report, run_parts
from tests.support import child_processes
from tests.support.child_processes import ChildEnded, ChildProcess, serving

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def modules_to_start() -> list[str]:
    """The modules that the Makefile's targets run."""
    return sorted(set(re.findall(r"python -m ((?:benchmarks|tools)\.\S+)", (ROOT / "Makefile").read_text())))


# In one process, because each would import torch.
LIST_OPTIONS = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (module, end.code)
"""


def test_benchmarks_that_are_too_slow_for_a_test_start_and_list_their_options(tmp_path: Path) -> None:
    modules = modules_to_start()
    command = [sys.executable, "-c", LIST_OPTIONS, *modules]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(modules) > 5


def test_a_measured_program_answers_line_by_line_and_its_last_words_are_reported() -> None:
    program = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin:\n  print(line.upper(), end='', flush=True)\n"
    child = ChildProcess("echo", [sys.executable, "-c", program + "  sys.exit('no more')"], {"SOME": "value"})
    assert child.call("it", much=1) == {"DO": "IT", "MUCH": 1}
    with pytest.raises(ChildEnded, match="echo ended: no more"):
        child.call("more")
    child.stop()


def test_a_server_runs_with_its_children_from_its_ready_line_to_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_processes, "STOP_TIMEOUT_S", 0.1)  # the child below never ends by itself
    sleeps = "import subprocess, time; subprocess.Popen(['sleep', '600'])"
    program = f"{sleeps}; print('serving at once', flush=True); time.sleep(600)"
    with serving([sys.executable, "-c", f"print('warms up'); {program}"], "^serving ") as process_id:
        server = psutil.Process(process_id)
        (child,) = server.children()
    assert psutil.wait_procs([server, child], 30.0)[1] == []
    with pytest.raises(RuntimeError, match=r"did not start: warms up \| no luck"):
        with serving([sys.executable, "-c", "print('warms up'); print('no luck, so never serving ')"], "^serving "):
            pass


def test_a_line_is_judged_printed_and_written_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report("trial")
    report.add(Line("less time is faster", 8.0, "ms", VLLM, 10.0, floor=4.0, least_ratio=1.25))
    report.add(Line("more tokens are faster", 1000.0, "tokens/s", VLLM, 800.0, floor=2000.0, least_ratio=1.5))
    report.add(Line("without its peer", 8.0, "ms", VLLM, None, least_ratio=1.25))
    report.add(Line("slow", 2.0, "s", most=1))
    report.add_table(("rate", "nothing", "failed"), [(1.5, "", 0), (2.0, "", 1)])
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert {"machine", "commit", "date", "load average"} < written.keys()
    assert [(line["ratio"], line["share_of_floor"], line["holds"]) for line in written["lines"]] == [
        (1.25, 0.5, True),
        (1.25, 0.5, False),
        (None, None, None),
        (None, None, False),
    ]
    assert "MISSED" in capsys.readouterr().out
    page = Path("build/bench/trial.md").read_text()
    assert "| without its peer | 8 ms | vLLM: not measured |" in page
    assert page.endswith("\n\n| rate | failed |\n| --- | --- |\n| 1.5 | 0 |\n| 2.0 | 1 |\n")


def test_a_part_that_fails_is_a_row_and_the_parts_after_it_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report("trial")

    def fails() -> None:
        report.add(Line("before", 1.0, "s"))
        raise RuntimeError("no luck")

    parts = {"broken": fails, "whole": lambda: report.add(Line("after", 2.0, "s")), "unwanted": fails}
    with pytest.raises(SystemExit, match="these sections failed: broken"):
        run_parts(report, parts, ["broken", "whole"])
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert [line["measure"] for line in written["lines"]] == ["before", "after"]
    assert written["failed"] == {"broken": "RuntimeError: no luck"}
    assert "| broken | failed: RuntimeError: no luck |" in Path("build/bench/trial.md").read_text()


@contextlib.contextmanager
def tool_and_its_server(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A program that starts a server and prints its process id. Both have ended after the block."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tool:
        assert tool.stdout is not None
        server = psutil.Process(int(tool.stdout.readline()))
        try:
            yield tool, server
        finally:
            tool.kill()
            if server.is_running():
                server.kill()


BLOCKED_STACK = """
import contextlib, sys, time
from tests.support.child_processes import serving
from tools import check_matrix

@contextlib.asynccontextmanager
async def blocked(_):
    with serving(["sh", "-c", "echo serving; exec sleep 600"], "^serving") as process_id:
        print(process_id, flush=True)
        time.sleep(600)
        yield

check_matrix.STACKS["blocked"] = blocked
sys.argv = ["check_matrix", "--stacks", "blocked"]
check_matrix.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_server_of_the_matrix_behind(number: signal.Signals) -> None:
    """While the stack starts and the loop is blocked."""
    command = [sys.executable, "-c", BLOCKED_STACK]
    with tool_and_its_server(command) as (tool, server):
        tool.send_signal(number)
        assert tool.wait(TIMEOUT_S) == -signal.SIGINT
        assert not server.is_running()


STUBBORN = """
import subprocess, sys, time
from pathlib import Path
from tests.support.child_processes import serving
from tests.support.vllm_server import VllmServer

told = sys.argv[2]
command = ["sh", "-c", f"trap 'touch {told}' TERM; touch {told}.trapped; echo serving; while :; do sleep 0.1; done"]

def run(process_id):
    while not Path(f"{told}.trapped").exists():
        time.sleep(0.01)
    print(process_id, flush=True)
    time.sleep(600)

if sys.argv[1] == "serving":
    with serving(command, "^serving") as process_id:
        run(process_id)
else:
    server = VllmServer(Path(told), 0)
    server.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        run(server.process.pid)
    finally:
        server.end()
"""


@pytest.mark.parametrize("kind", ["serving", "vllm"])
def test_a_second_ctrl_c_leaves_no_server_behind_that_does_not_end(kind: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", STUBBORN, kind, str(told)]
    with tool_and_its_server(command) as (tool, server):
        tool.send_signal(signal.SIGINT)
        limit = time.monotonic() + TIMEOUT_S
        while not told.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        tool.send_signal(signal.SIGINT)
        assert tool.wait(TIMEOUT_S) == -signal.SIGINT
        assert not server.is_running()
