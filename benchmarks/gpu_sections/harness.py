"""Runs the sections of benchmarks/gpu.py, one process after the other, and keeps their figures.

    section     appends JSON objects to a file, one a line: {"line": ...} {"note": ...} {"machine": ...} {"error": ...}
    harness     kills the section at its deadline, and writes gpu.json and gpu.md after each section

A section may also use the time that the sections before it have left. Figures that a section wrote before its deadline
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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.report import Line, commit_of, line_json, table

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "model_files", "engine", "kv_transfer", "benchmarks")


@dataclass(frozen=True, slots=True)
class About:
    """A section: its part of the time, and its title."""

    seconds: float
    title: str


SECTIONS = {
    "rates": About(60, "rates of the device; decode attention over both layouts of the pool"),
    "kernels": About(60, "products with fp8 weights and attention over fp8 KV, beside the same in bfloat16"),
    "decode": About(180, "decode of an 8B model in bfloat16, 1, 32 and 128 sequences of 2,048 and 8,192 tokens"),
    "prefill": About(90, "prompts of 2,048 and 8,192 tokens of an 8B model"),
    "hand_off": About(90, "blocks of an 8B model between two processes: runs and shuffled blocks; the lane"),
    "vllm_inside": About(200, "vLLM inside Tandem: hand-offs by NIXL, the tokens of two pools, a kill of each worker"),
    "beside_vllm": About(420, "Tandem beside vLLM: one 8B model, one client, one load"),
    "fleet": About(150, "`tandem serve` with an 8B model: two pools that share the GPU, and one undivided worker"),
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

    def read(self, messages: Path) -> None:
        """The last line of a killed section may be half a line."""
        for text in messages.read_text(encoding="utf-8").splitlines() if messages.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                self.take(json.loads(text))

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
        return asdict(self) | {"lines": [line_json(line) for line in self.lines]}


def run_sections(run: Run, names: Sequence[str]) -> int:
    """Run the sections in order. Returns 0 if all are complete; a missed goal is a figure, not a failure."""
    run.out.mkdir(parents=True, exist_ok=True)
    head = {"commit": run.commit or commit_of(), "source": source_digest(ROOT)}
    head |= {"started": time.strftime("%F %T %Z"), "device": "cpu" if run.rehearse else "cuda"}
    results = {name: SectionResult(name) for name in names}
    scale = run.seconds / sum(SECTIONS[name].seconds for name in names)
    deadline = time.monotonic()
    with (run.out / "gpu.log").open("w", encoding="utf-8") as log:
        for name, result in results.items():
            deadline += SECTIONS[name].seconds * scale
            run_child(run, result, deadline - time.monotonic(), log)
            write(run.out, head, list(results.values()))
            show(result)
    return 0 if all(result.status == "complete" for result in results.values()) else 1


def run_child(run: Run, result: SectionResult, allowed_s: float, log: IO[str]) -> None:
    """Run one section until it ends or `allowed_s` are over."""
    print(f"---- {result.name}", file=log, flush=True)
    messages = run.out / "messages"
    messages.unlink(missing_ok=True)
    start, result.allowed_s = time.monotonic(), allowed_s
    command: list[str | Path] = [sys.executable, run.program, "--child", result.name]
    command += ["--allowed-s", str(allowed_s), "--out", run.out]
    child = subprocess.Popen(
        [*command, "--rehearse"] if run.rehearse else command,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,  # its children end with it
    )  # fmt: skip
    try:
        code = child.wait(max(allowed_s, 0.0))
        if code:
            result.error = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        result.status = "failed" if code else "complete"
    except subprocess.TimeoutExpired:
        result.status, result.error = "out of time", f"killed after {allowed_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    result.read(messages)
    result.seconds = time.monotonic() - start


def write(out: Path, head: dict[str, Any], results: Sequence[SectionResult]) -> None:
    """Replace gpu.json and gpu.md at once: a run that is cut short leaves whole files."""
    machine = next((result.machine for result in results if result.machine), {})
    content = head | {"machine": machine, "sections": [result.as_json() for result in results]}
    for name, text in (("gpu.json", json.dumps(content, indent=1) + "\n"), ("gpu.md", page(head, machine, results))):
        new = out / "new"
        new.write_text(text, encoding="utf-8")
        new.replace(out / name)


def page(head: dict[str, Any], machine: dict[str, str], results: Sequence[SectionResult]) -> str:
    """The tables for docs/gpu.md."""
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    parts = [f"{head['started']}, commit {head['commit']}: {about}"]
    for result in results:
        title = SECTIONS[result.name].title
        ended = "" if result.status == "complete" else f": {result.status}. {result.error}".rstrip()
        parts.append(f"#### {title[:1].upper()}{title[1:]}{ended}")
        if result.lines:
            parts.append(table([line.row() for line in result.lines]).rstrip())
        parts += [f"- {note}" for note in result.notes]
    return "\n\n".join(parts) + "\n"


def show(result: SectionResult) -> None:
    print(f"{result.name}: {result.status}, {result.seconds:.1f} of {result.allowed_s:.0f} s {result.error}".rstrip())
    for line in result.lines:
        print(f"  {line.text()}")
    for note in result.notes:
        print(f"  note: {note}")
    sys.stdout.flush()


def source_digest(root: Path) -> str:
    """Names the code where there is no git: a digest of the files that a run imports."""
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
