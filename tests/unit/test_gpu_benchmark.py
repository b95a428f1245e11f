"""benchmarks/gpu.py: a section that fails, hangs or dies costs no other section its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_sections import harness
from benchmarks.gpu_sections.harness import About, Run, run_sections

FIGURE = '{"line": {"measure": "a rate", "value": 2.0, "unit": "TB/s", "floor": 4.0, "least_share": 0.7}}'
# A program in the place of benchmarks/gpu.py; argv[2] is the section, argv[6] the folder.
PROGRAM = f"""
import os, signal, subprocess, sys, time
name, messages = sys.argv[2], open(sys.argv[6] + "/messages", "w", buffering=1)
print('{{"machine": {{"device": "fake"}}}}', file=messages)
print('{FIGURE}', file=messages)
if name == "fails":
    print('{{"error": "RuntimeError: no luck"}}', file=messages)
    sys.exit(1)
if name == "dies":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "hangs":
    child = subprocess.Popen(["sleep", "60"])
    print('{{"note": "%d"}}' % child.pid, file=messages)
    messages.write('{{"line": {{"meas')
    messages.flush()
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(harness, "SECTIONS", {name: About(1, name) for name in ("fails", "dies", "hangs", "works")})
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return Run(program, tmp_path / "out", seconds=8.0, rehearse=True)


def sections_of(run: Run) -> dict[str, Any]:
    written = json.loads((run.out / "gpu.json").read_text())
    return {section["name"]: section for section in written["sections"]}


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sections_that_fail_die_or_hang_keep_their_figures_and_the_next_section_runs(run: Run) -> None:
    assert run_sections(run, ["fails", "dies", "hangs", "works"]) == 1
    found = sections_of(run)
    assert {name: section["status"] for name, section in found.items()} == {
        "fails": "failed",
        "dies": "failed",
        "hangs": "out of time",
        "works": "complete",
    }
    assert found["fails"]["error"] == "RuntimeError: no luck"
    assert found["dies"]["error"] == "ended by SIGSEGV"
    for section in found.values():
        (line,) = section["lines"]
        assert (line["share_of_floor"], line["holds"]) == (0.5, False)
    (child,) = found["hangs"]["notes"]  # a child of a killed section ends with it
    deadline = time.monotonic() + 10.0
    while is_alive(int(child)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
