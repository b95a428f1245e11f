"""`python -m pytest tests/gpu`, counted as it runs: a test that hangs costs the tests behind it, not the counts so far.

A rehearsal skips every test, because each asks for a device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter

from benchmarks.gpu_sections.harness import ROOT
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line

OPTIONS = ("-v", "-p", "no:cacheprovider", "--durations=5", "tests/gpu")
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
REPORT_S = 5.0  # before the section's deadline


def run(section: Section) -> None:
    found: Counter[str] = Counter()
    command = [sys.executable, "-m", "pytest", *OPTIONS]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(section.seconds_left - REPORT_S, process.kill)
    timer.start()
    assert process.stdout is not None
    for text in process.stdout:
        print(text, end="", flush=True)
        if outcome := OUTCOME.match(text):
            found[outcome[2]] += 1
            if outcome[2] in ("FAILED", "ERROR"):
                section.note(f"{outcome[1]} failed")
    timer.cancel()
    code = process.wait()
    section.add(Line("tests that pass", found["PASSED"], "tests"))
    section.add(Line("tests that fail", found["FAILED"] + found["ERROR"], "tests", most=0))
    section.add(Line("tests that are skipped", found["SKIPPED"], "tests"))
    if code:
        raise RuntimeError(f"pytest ended with code {code} after {found.total()} tests")
