"""The sections of benchmarks/gpu.py in their order, one process after the other; what decides most comes first.

    section     writes its report, OUT/<section>.json and .md, with each figure (benchmarks/report.py)
    harness     kills the section at its deadline, and writes OUT/gpu.json and gpu.md after each section

Time on a GPU is short and may end at any moment. A section may also use the time that the sections before it have left.
Figures of a killed section are kept. A complete section of an earlier run is not measured again if the code and the
device are the same. This module imports no torch: a process that holds the device would disturb the sections.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.report import commit_of, replace_file
from tests.support.child_processes import group_killed

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = frozenset({"build", "deploy", "docs", "examples", "simulator", "tools"})  # folders
COMPLETE = "complete"

Result = dict[str, Any]  # of a section: name, status, error, seconds, and what its report has


@dataclass(frozen=True, slots=True)
class About:
    seconds: float  # until its deadline, the start of the process included
    title: str
    decides: str  # what follows from its figures


SECTIONS = {
    "tests": About(
        280, "the tests that need a GPU",
        "whether any figure counts: a wrong token or a lost block comes first",
    ),
    "vllm_inside": About(
        200, "vLLM inside Tandem: hand-offs by NIXL, the tokens of two pools, a kill of each worker",
        "whether workers with vLLM may be called tested on GPUs",
    ),
    "beside_vllm": About(
        420, "Tandem beside vLLM: one 8B model, one client, one load",
        "for which load to choose two pools, one worker, or vLLM alone: decode and prompts at least 1.0 x vLLM",
    ),
    "decode": About(
        240, "decode of an 8B model, 1, 32 and 128 sequences of 2,048 and 8,192 tokens; with fp8 weights, with fp8 KV",
        "whether launches, products of few rows and the draw of tokens need work: sampling at most 3 % of a step of 32"
        "; what the 8-bit options gain",
    ),
    "prefill": About(
        120, "prompts of 2,048 and 8,192 tokens of an 8B model; with fp8 KV",
        "whether prompts need work on kernels: at least 0.6 of the rate of a product; what fp8 KV costs them",
    ),
}  # fmt: skip


def plan_text(sections: Mapping[str, About], states: Mapping[str, str]) -> str:
    """The table of `--plan`. `states`: what an earlier run has of a section; none = to do."""
    rows = [
        f"{name:12s} {about.seconds:4.0f} s  {states.get(name, 'to do')}\n"
        f"    {about.title}\n    Decides {about.decides}."
        for name, about in sections.items()
    ]
    seconds = sum(about.seconds for name, about in sections.items() if states.get(name) != "done")
    return "\n".join([*rows, f"{seconds:.0f} s to do"])


@dataclass(frozen=True, slots=True)
class Run:
    program: Path
    out: Path
    seconds: float | None  # for all sections to do; each has its part. None: as planned
    rehearse: bool
    commit: str = ""  # "": ask git
    sections: Mapping[str, About] = field(default_factory=lambda: SECTIONS)


def run_sections(run: Run, names: Collection[str], again: bool = False) -> int:
    """Run the sections of the plan that are named and not done; `again`: those that are done, too.

    Returns 0 if all named ones are complete. A missed goal is a figure, not a failure.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    head = {"commit": run.commit or commit_of(), "source": source_digest(ROOT)}
    head |= {"started": time.strftime("%F %T %Z"), "device": device_of(run)}
    results = earlier_results(run)
    todo = [name for name in run.sections if name in names and (again or not is_done(results.get(name)))]
    scale = run.seconds / sum(run.sections[name].seconds for name in todo) if run.seconds and todo else 1.0
    deadline = time.monotonic()
    with (run.out / "gpu.log").open("a", encoding="utf-8") as log:
        for name in todo:
            deadline += run.sections[name].seconds * scale
            results[name] = run_child(run, name, deadline - time.monotonic(), log)
            found = [results[each] for each in run.sections if each in results]
            replace_file(run.out / "gpu.json", json.dumps(head | {"sections": found}, indent=1) + "\n")
            pages = "\n".join(page(run, result) for result in found)
            replace_file(run.out / "gpu.md", f"{head['started']}, commit {head['commit']}\n\n{pages}")
            print(page(run, results[name]), flush=True)
    return 0 if all(results[name]["status"] == COMPLETE for name in names) else 1


def is_done(result: Result | None) -> bool:
    """A section without figures lacked a package, which a later run may have."""
    return result is not None and result["status"] == COMPLETE and bool(result["lines"])


def earlier_results(run: Run) -> dict[str, Result]:
    """What DIR has of this code on this device."""
    try:
        found = json.loads((run.out / "gpu.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    is_same = (found.get("source"), found["device"]) == (source_digest(ROOT), device_of(run))
    return {result["name"]: result for result in found["sections"]} if is_same else {}


def states_of(run: Run) -> dict[str, str]:
    """For `--plan`: the sections that an earlier run has begun."""
    return {
        name: "done" if is_done(result) else f"to do ({result['status']}: {result['error'] or 'no figures'})"
        for name, result in earlier_results(run).items()
    }


def device_of(run: Run) -> str:
    return "cpu" if run.rehearse else query_gpu("name")


def query_gpu(field: str) -> str:
    """Of the first GPU, by nvidia-smi. Empty without a GPU."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run_child(run: Run, name: str, allowed_s: float, log: IO[str]) -> Result:
    """Run one section until it ends or `allowed_s` are over."""
    print(f"---- {name}", file=log, flush=True)
    report = run.out / f"{name}.json"
    for path in (report, report.with_suffix(".md")):
        path.unlink(missing_ok=True)
    start, status, error = time.monotonic(), COMPLETE, ""
    command: list[str | Path] = [sys.executable, run.program, "--child", name]
    command += ["--allowed-s", str(allowed_s), "--out", run.out]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # its fleets find Tandem from any folder
    child = subprocess.Popen(
        [*command, "--rehearse"] if run.rehearse else command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,  # its children end with it
    )  # fmt: skip
    with group_killed(child):
        try:
            if code := child.wait(max(allowed_s, 0.0)):
                error = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                status = "failed"
        except subprocess.TimeoutExpired:
            status, error = "out of time", f"killed after {allowed_s:.0f} s"
    written = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"lines": []}
    return written | {"name": name, "status": status, "error": error, "seconds": time.monotonic() - start}


def page(run: Run, result: Result) -> str:
    """The table of a section for docs/gpu.md."""
    title, text = run.sections[result["name"]].title, run.out / f"{result['name']}.md"
    ended = "" if result["status"] == COMPLETE else f": {result['status']}. {result['error']}"
    written = text.read_text(encoding="utf-8") if text.exists() else ""
    return f"#### {title[:1].upper()}{title[1:]}{ended}\n\n{result.get('machine', '')}\n\n{written}"


def source_digest(root: Path) -> str:
    """Names the code that a run measures, also where there is no git."""
    folders = [folder for folder in root.glob("[!.]*/") if folder.name not in NOT_MEASURED]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
