"""benchmarks/gpu.py: a section that fails, hangs or dies costs no other section its figures."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_sections import decode, harness
from benchmarks.gpu_sections.harness import About, Run, SectionResult, run_sections, source_digest
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line

ROOT = Path(__file__).parents[2]
FIGURE = '{"line": {"measure": "a rate", "value": 2.0, "unit": "TB/s", "floor": 4.0, "least_share": 0.7}}'
# A program in the place of benchmarks/gpu.py; argv[2] is the section.
PROGRAM = f"""
import os, signal, subprocess, sys, time
name = sys.argv[2]
print('{{"machine": {{"device": "fake"}}}}', flush=True)
print('{FIGURE}', flush=True)
if name == "fails":
    print('{{"error": "RuntimeError: no luck"}}', flush=True)
    sys.exit(1)
if name == "dies":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "hangs":
    child = subprocess.Popen(["sleep", "60"])
    print('{{"note": "%d"}}' % child.pid, flush=True)
    sys.stdout.write('{{"line": {{"meas')
    sys.stdout.flush()
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


def has_state(process_id: int, states: str) -> bool:
    """Whether the process exists in one of these states, a letter each (proc(5))."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in states
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_children_of_a_section_out_of_time_end_with_it(run: Run) -> None:
    run_sections(run, ["hangs"])
    (child,) = sections_of(run)["hangs"]["notes"]
    deadline = time.monotonic() + 10.0
    while has_state(int(child), "RSD"):  # it is killed, and ends when the kernel gets to it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_is_whole_after_each_section(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[list[str]] = []

    def show(_: SectionResult) -> None:
        statuses.append([section["status"] for section in sections_of(run).values()])

    monkeypatch.setattr(harness, "show", show)
    assert run_sections(run, ["works", "fails"]) == 1
    assert statuses == [["complete", "not run"], ["complete", "failed"]]


def test_a_section_may_use_the_time_that_the_sections_before_it_have_left(run: Run) -> None:
    run_sections(run, ["works", "fails"])
    found = sections_of(run)
    assert found["works"]["allowed_s"] == pytest.approx(4.0, abs=0.5)
    assert found["fails"]["allowed_s"] == pytest.approx(8.0 - found["works"]["seconds"], abs=0.5)


def test_a_figure_is_judged_by_its_share_of_the_floor() -> None:
    assert Line("a step", 5.0, "ms", floor=4.5, least_share=0.8).holds
    assert not Line("a step", 6.0, "ms", floor=4.5, least_share=0.8).holds
    assert Line("a step", 6.0, "ms", least_share=0.8).holds is None


def test_the_digest_of_the_sources_changes_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core/a.py").write_text("a = 1")
    before = source_digest(tmp_path)
    (tmp_path / "core/a.py").write_text("a = 2")
    assert source_digest(tmp_path) != before


def rehearse(folder: Path, sections: list[str]) -> dict[str, Any]:
    """Run from another folder: that of the program holds folders named like packages of Tandem."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--sections", *sections, "--out", "."]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + (folder / "gpu.log").read_text()
    written: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    assert (written["device"], written["machine"]["device"]) == ("cpu", "CPU, a rehearsal")
    return written


def is_wrong(line: dict[str, Any]) -> bool:
    """A goal that is no speed is missed."""
    return line["unit"] == "" and line["holds"] is False


def test_sections_rehearse_on_a_cpu(tmp_path: Path) -> None:
    sections = rehearse(tmp_path, ["rates", "hand_off"])["sections"]
    for section in sections:
        assert section["lines"]
        assert all(line["value"] > 0 for line in section["lines"])
    measures = " ".join(line["measure"] for line in sections[1]["lines"])
    assert "lane cuda_ipc" in measures
    assert "lane staged" in measures


def test_a_batch_that_does_not_fit_is_noted_and_the_others_are_measured() -> None:
    messages = io.StringIO()
    decode.run(Section(60.0, True, messages))
    found = SectionResult("decode")
    for line in messages.getvalue().splitlines():
        found.take(json.loads(line))
    assert len(found.lines) == 10
    assert all(line.value > 0 and line.floor for line in found.lines)
    assert any("does not fit" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_section_rehearses_on_a_cpu(tmp_path: Path) -> None:
    for section in rehearse(tmp_path, list(harness.SECTIONS))["sections"]:
        assert section["lines"]
        assert not [line for line in section["lines"] if is_wrong(line)]
