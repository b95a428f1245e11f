"""Runs the sections of benchmarks/gpu.py, one process after the other, and keeps their figures.

    section     appends JSON objects to a file, one a line: {"line": ...} {"note": ...} {"machine": ...} {"error": ...}
    harness     kills the section at its deadline, and writes gpu.json and gpu.md after each section

A section may also use the time that the sections before it have left. Figures that a section wrote before its deadline
are kept. A complete section of an earlier run is not measured again if the code and the device are the same. This
module imports no torch: a process that holds the device would disturb the sections.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_sections.plan import SECTIONS, About
from benchmarks.processes import group_killed
from benchmarks.report import COLUMNS, Line, commit_of, table

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = frozenset({"build", "deploy", "docs", "examples", "simulator", "tools"})  # folders
COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Run:
    program: Path
    out: Path
    seconds: float | None  # for all sections to do; each has its part. None: as planned
    rehearse: bool
    commit: str = ""  # "": ask git
    sections: Mapping[str, About] = field(default_factory=lambda: SECTIONS)


@dataclass(slots=True)
class SectionResult:
    name: str
    status: str = "not run"  # COMPLETE | failed | out of time | not run
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

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> SectionResult:
        return cls(**values | {"lines": [Line(**line) for line in values["lines"]]})


def run_sections(run: Run, names: Collection[str], again: bool = False) -> int:
    """Run the sections of the plan that are named and not done; `again`: those that are done, too.

    Returns 0 if all named ones are complete. A missed goal is a figure, not a failure.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    head = {"commit": run.commit or commit_of(), "source": source_digest(ROOT)}
    head |= {"started": time.strftime("%F %T %Z"), "device": "cpu" if run.rehearse else "cuda"}
    results = earlier_results(run)
    todo = [name for name in run.sections if name in names and (again or not is_done(results.get(name)))]
    scale = run.seconds / sum(run.sections[name].seconds for name in todo) if run.seconds and todo else 1.0
    deadline = time.monotonic()
    with (run.out / "gpu.log").open("a", encoding="utf-8") as log:
        for name in todo:
            results[name] = SectionResult(name)
            deadline += run.sections[name].seconds * scale
            run_child(run, results[name], deadline - time.monotonic(), log)
            write(run, head, [results[name] for name in run.sections if name in results])
            show(results[name])
    return 0 if all(results[name].status == COMPLETE for name in names) else 1


def is_done(result: SectionResult | None) -> bool:
    """A section without figures lacked a package, which a later run may have."""
    return result is not None and result.status == COMPLETE and bool(result.lines)


def earlier_results(run: Run) -> dict[str, SectionResult]:
    """What DIR has of this code on this device."""
    try:
        found = json.loads((run.out / "gpu.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    same_code = found.get("source") == source_digest(ROOT)
    same_device = found["device"] == "cpu" if run.rehearse else found["machine"].get("device") == device_name()
    if not (same_code and same_device):
        return {}
    return {values["name"]: SectionResult.of_json(values) for values in found["sections"]}


def states_of(run: Run) -> dict[str, str]:
    """For `--plan`: the sections that an earlier run has begun."""
    return {
        result.name: "done" if is_done(result) else f"to do ({result.status}: {result.error or 'no figures'})"
        for result in earlier_results(run).values()
    }


def device_name() -> str:
    """As torch names it. Empty without a GPU."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run_child(run: Run, result: SectionResult, allowed_s: float, log: IO[str]) -> None:
    """Run one section until it ends or `allowed_s` are over."""
    print(f"---- {result.name}", file=log, flush=True)
    messages = run.out / "messages"
    messages.unlink(missing_ok=True)
    start, result.allowed_s = time.monotonic(), allowed_s
    command: list[str | Path] = [sys.executable, run.program, "--child", result.name]
    command += ["--allowed-s", str(allowed_s), "--out", run.out]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # its fleets find Tandem from any folder
    child = subprocess.Popen(
        [*command, "--rehearse"] if run.rehearse else command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,  # its children end with it
    )  # fmt: skip
    with group_killed(child):
        try:
            code = child.wait(max(allowed_s, 0.0))
            if code:
                result.error = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            result.status = "failed" if code else COMPLETE
        except subprocess.TimeoutExpired:
            result.status, result.error = "out of time", f"killed after {allowed_s:.0f} s"
    result.read(messages)
    result.seconds = time.monotonic() - start


def write(run: Run, head: dict[str, Any], results: Sequence[SectionResult]) -> None:
    """Replace gpu.json and gpu.md at once: a run that is cut short leaves whole files."""
    content = head | {"machine": machine_of(results), "sections": [asdict(result) for result in results]}
    for name, text in (
        ("gpu.json", json.dumps(content, indent=1) + "\n"),
        ("gpu.md", page(run.sections, head, results)),
    ):
        new = run.out / "new"
        new.write_text(text, encoding="utf-8")
        new.replace(run.out / name)


def page(sections: Mapping[str, About], head: dict[str, Any], results: Sequence[SectionResult]) -> str:
    """The tables for docs/gpu.md."""
    about = ", ".join(f"{name} {value}" for name, value in machine_of(results).items())
    parts = [f"{head['started']}, commit {head['commit']}: {about}"]
    for result in results:
        title = sections[result.name].title
        ended = "" if result.status == COMPLETE else f": {result.status}. {result.error}".rstrip()
        parts.append(f"#### {title[:1].upper()}{title[1:]}{ended}")
        if result.lines:
            parts.append(table(COLUMNS, [line.row() for line in result.lines]).rstrip())
        parts += [f"- {note}" for note in result.notes]
    return "\n\n".join(parts) + "\n"


def machine_of(results: Sequence[SectionResult]) -> dict[str, str]:
    return next((result.machine for result in results if result.machine), {})


def show(result: SectionResult) -> None:
    print(f"{result.name}: {result.status}, {result.seconds:.1f} of {result.allowed_s:.0f} s {result.error}".rstrip())
    for line in result.lines:
        print(f"  {line.text()}")
    for note in result.notes:
        print(f"  note: {note}")
    sys.stdout.flush()


def source_digest(root: Path) -> str:
    """Names the code that a run measures, also where there is no git."""
    folders = [folder for folder in root.glob("[!.]*/") if folder.name not in NOT_MEASURED]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
