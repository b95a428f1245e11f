"""`tandem check`: one line for each question as soon as it is answered, the requests that show failures, reports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cli.screens.terminal import print_line
from conformance.check import CheckPlan, check
from conformance.findings import Finding, Outcome, exit_code
from conformance.report import as_json, as_junit

STYLES = {Outcome.HOLDS: "green", Outcome.FAILS: "bold red", Outcome.NOT_SHOWN: "yellow"}
INDENT = " " * 11


async def run_check(plan: CheckPlan, console: Console, json_file: Path | None, junit_file: Path | None) -> int:
    """Returns the exit code."""
    reference = plan.reference.url if plan.reference else "none"
    print_line(console, f"{plan.stack.url}, reference {reference}, seed {plan.seed}")
    findings = []
    async for finding in check(plan):
        findings.append(finding)
        show(finding, console)
    counts = Counter(finding.outcome for finding in findings)
    print_line(console, ", ".join(f"{outcome.value}: {counts[outcome]}" for outcome in Outcome))
    for file, form in ((json_file, as_json), (junit_file, as_junit)):
        if file is not None:
            file.write_text(form(plan.stack.url, findings), encoding="utf-8")
    return exit_code(findings)


def show(finding: Finding, console: Console) -> None:
    line = Text(finding.outcome.value.ljust(len(INDENT)), style=STYLES[finding.outcome])
    line.append(finding.question, style="default")
    console.print(line)
    print_line(console, INDENT + finding.why, "dim")
    if finding.curl:
        print_line(console, INDENT + finding.curl)
