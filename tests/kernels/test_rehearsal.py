"""benchmarks/gpu.py --rehearse: each section of the GPU benchmark, its kernels under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_sections.harness import SECTIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # the longest takes half a minute on an idle core
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_rehearses_under_the_interpreter(tmp_path: Path, name: str) -> None:
    """Run from another folder: that of the program holds folders named like packages of Tandem."""
    options = ["--rehearse", "--out", ".", "--seconds", "1500", "--sections", name]
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.log").read_text()
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (written["device"], written["machine"]["device"]) == ("cpu", "CPU, a rehearsal")
    (section,) = written["sections"]
    assert section["name"] == name
    assert all(line["value"] > 0 for line in section["lines"])
    if name == "decode":
        assert any("does not fit" in note for note in section["notes"])
    if name == "hand_off":
        measures = " ".join(line["measure"] for line in section["lines"])
        assert "lane cuda_ipc" in measures
