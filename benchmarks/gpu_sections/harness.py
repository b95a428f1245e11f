"""Runs the sections of benchmarks/gpu.py, one process after the other, and keeps their figures.

    section     sends JSON objects, one a line: {"line": ...} {"note": ...} {"machine": ...} {"error": ...}
    harness     kills the section at its deadline, and writes gpu.json after each section

A section may also use the time that the sections before it have left. Figures that a section sent before its deadline
are kept. This module imports no torch: a process that holds the device would disturb the sections.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.report import Line, number

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1  # of gpu.json
SOURCES = ("core", "model_files", "engine", "kv_transfer", "benchmarks")
TOTAL_S = 540.0


@dataclass(frozen=True, slots=True)
class About:
    """A section: its share of TOTAL_S, its title and its goal in docs/gpu.md."""

    seconds: float
    title: str
    goal: str = ""


SECTIONS = {
    "rates": About(40, "rates of the device; decode attention over both layouts of the pool"),
    "kernels": About(
        70,
        "operators against their references, in a pool poisoned with NaN; graphs against single launches;"
        " no hidden synchronisation",
        "float32 1e-5, half precision 2e-2, the same tokens",
    ),
    "families": About(
        60,
        "greedy float32 tokens of small models beside `transformers`: whole, in chunks, with a cached prefix, "
        "preempted, resumed, through two processes",
        "identical",
    ),
    "decode": About(
        120,
        "decode of an 8B model in bfloat16, 1, 32 and 128 sequences of 2,048 and 8,192 tokens",
        "step on the device at least 0.8 of the bandwidth's floor, served step 0.7",
    ),
    "prefill": About(
        60, "prompts of 2,048 and 8,192 tokens of an 8B model", "at least 0.6 of the matrix rate (causal FLOP)"
    ),
    "hand_off": About(
        60,
        "blocks of an 8B model between two processes: runs and shuffled blocks; the lane",
        "mapped pool at least 0.7 of a copy on the device",
    ),
    "faults": About(
        30,
        "out of memory, an illegal access, a peer killed during a read",
        "the worker ends or goes on, the pool is intact",
    ),
    "peers": About(90, "tokens of the same prompts beside continuous batching of `transformers`", "at least 3 x"),
}


@dataclass(frozen=True, slots=True)
class Run:
    program: Path
    out: Path
    seconds: float
    rehearse: bool
    commit: str = ""  # "": ask git


@dataclass(slots=True)
class SectionResult:
    name: str
    status: str = "not run"  # complete | failed | out of time | not run
    seconds: float = 0.0
    allowed_s: float = 0.0
    error: str = ""
    notes: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)

    def take(self, message: dict[str, Any]) -> None:
        match message:
            case {"line": values}:
                self.lines.append(Line(**values))
            case {"note": text}:
                self.notes.append(text)
            case {"machine": found}:
                self.machine = found
            case {"error": text}:
                self.error = text
            case _:
                raise ValueError(f"a section sent {message}")

    def as_json(self) -> dict[str, Any]:
        lines = [asdict(line) | {"share_of_floor": line.share_of_floor, "holds": line.holds} for line in self.lines]
        return asdict(self) | {"lines": lines}


def run_sections(run: Run, names: Sequence[str]) -> int:
    """Run the sections in order. Returns 0 if all are complete; a missed goal is a figure, not a failure."""
    run.out.mkdir(parents=True, exist_ok=True)
    commit = run.commit or commit_of(ROOT)
    head = {"format": FORMAT, "commit": commit, "source": source_digest(ROOT), "started": time.strftime("%F %T %Z")}
    head |= {"device": "cpu" if run.rehearse else "cuda"}
    results = {name: SectionResult(name) for name in names}
    scale = run.seconds / sum(SECTIONS[name].seconds for name in names)
    deadline = time.monotonic()
    with (run.out / "gpu.log").open("w", encoding="utf-8") as log:
        for name, result in results.items():
            deadline += SECTIONS[name].seconds * scale
            run_child(run, result, deadline - time.monotonic(), log)
            write_json(run.out / "gpu.json", head, list(results.values()))
            show(result)
    return 0 if all(result.status == "complete" for result in results.values()) else 1


def run_child(run: Run, result: SectionResult, allowed_s: float, log: IO[str]) -> None:
    """Run one section until it ends or `allowed_s` are over."""
    print(f"---- {result.name}", file=log, flush=True)
    start, result.allowed_s = time.monotonic(), allowed_s
    command = [sys.executable, str(run.program), "--child", result.name, "--allowed-s", str(allowed_s)]
    child = subprocess.Popen(
        [*command, "--rehearse"] if run.rehearse else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        process_group=0,  # the children of the section end with it
    )
    assert child.stdout is not None
    reader = threading.Thread(target=take_messages, args=(child.stdout, result), daemon=True)
    reader.start()
    try:
        code = child.wait(max(allowed_s, 0.0))
        result.status = "failed" if code or result.error else "complete"
        if code and not result.error:
            result.error = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except subprocess.TimeoutExpired:
        result.status, result.error = "out of time", f"killed after {allowed_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    reader.join()
    child.stdout.close()
    result.seconds = time.monotonic() - start


def take_messages(output: IO[str], result: SectionResult) -> None:
    for line in output:
        with contextlib.suppress(json.JSONDecodeError):  # the half line of a killed section
            result.take(json.loads(line))


def write_json(path: Path, head: dict[str, Any], results: Sequence[SectionResult]) -> None:
    """Replace the file at once: a run that is cut short leaves a whole file."""
    machine = next((result.machine for result in results if result.machine), {})
    content = head | {"machine": machine, "sections": [result.as_json() for result in results]}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def show(result: SectionResult) -> None:
    """A short table: a caller may keep only the end of the output."""
    print(f"{result.name}: {result.status}, {result.seconds:.1f} of {result.allowed_s:.0f} s {result.error}".rstrip())
    for line in result.lines:
        share = f" {number(line.share_of_floor)} of the floor" if line.floor is not None else ""
        beside = f" {number(line.ratio)} x {line.peer}" if line.ratio is not None else ""
        verdict = {None: "", True: " holds", False: " MISSED"}[line.holds]
        print(f"  {line.measure}: {number(line.value)} {line.unit}{beside}{share}{verdict}")
    for note in result.notes:
        print(f"  note: {note}")
    sys.stdout.flush()


def commit_of(root: Path) -> str:
    """The commit, with "+" behind it if the tree has changes; "unknown" without git."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def source_digest(root: Path) -> str:
    """Names the code where there is no git: a digest of the files that a run imports."""
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
