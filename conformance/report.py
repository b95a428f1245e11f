"""The findings as JSON and as JUnit's XML. Pure. Text of the stack has its control characters escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.etree import ElementTree

from conformance.findings import Finding, Outcome, exit_code
from core.plain_text import escaped as without_controls


def escaped(text: str) -> str:
    """Without the two characters that XML lacks, too."""
    return without_controls(text).replace("\ufffe", r"\ufffe").replace("\uffff", r"\uffff")


def as_json(url: str, findings: Sequence[Finding]) -> str:
    rows = [
        {
            "question": finding.question,
            "outcome": finding.outcome.value,
            "severity": finding.severity.name.lower(),
            "why": escaped(finding.why),
            "curl": escaped(finding.curl),
        }
        for finding in findings
    ]
    return json.dumps({"url": url, "exit_code": exit_code(findings), "findings": rows}, indent=2) + "\n"


def as_junit(url: str, findings: Sequence[Finding]) -> str:
    """One test case for each question; what was not shown is skipped."""
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    suite = ElementTree.Element(
        "testsuite",
        name=f"tandem check {url}",
        tests=str(len(findings)),
        failures=str(counts[Outcome.FAILS]),
        skipped=str(counts[Outcome.NOT_SHOWN]),
    )
    for finding in findings:
        case = ElementTree.SubElement(suite, "testcase", name=finding.question, classname="tandem.check")
        if finding.outcome is Outcome.FAILS:
            failure = ElementTree.SubElement(
                case, "failure", message=escaped(finding.why), type=finding.severity.name.lower()
            )
            failure.text = escaped(finding.curl)
        elif finding.outcome is Outcome.NOT_SHOWN:
            ElementTree.SubElement(case, "skipped", message=escaped(finding.why))
        else:
            ElementTree.SubElement(case, "system-out").text = escaped(finding.why)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
