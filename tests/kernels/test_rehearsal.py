"""benchmarks/gpu.py --rehearse: every section of the GPU benchmark, its kernels under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_sections.harness import SECTIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # 110 s on an idle core
def test_every_section_rehearses_under_the_interpreter(tmp_path: Path) -> None:
    """Run from another folder: that of the program holds folders named like packages of Tandem."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--out", ".", "--seconds", "3000"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.log").read_text()
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (written["device"], written["machine"]["device"]) == ("cpu", "CPU, a rehearsal")
    sections = {section["name"]: section for section in written["sections"]}
    assert sections.keys() == SECTIONS.keys()
    assert all(line["value"] > 0 for section in sections.values() for line in section["lines"])
    assert any("does not fit" in note for note in sections["decode"]["notes"])
    measures = " ".join(line["measure"] for line in sections["hand_off"]["lines"])
    assert "lane cuda_ipc" in measures
    assert "lane staged" in measures
