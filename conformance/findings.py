"""What the check says of one question: it holds, it fails, or it was not shown, and why. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from conformance.http_exchange import Call, Endpoint

MAX_WHY = 400  # characters of a reason, which may quote the stack; beyond: it is cut


class Outcome(Enum):
    HOLDS = "holds"
    FAILS = "fails"
    NOT_SHOWN = "not shown"


class Severity(IntEnum):
    """How bad a failure is. The exit code of the command is the worst one's."""

    FORM = 3  # a client misreads an answer: events, counts, errors
    SERVICE = 4  # a client waits in vain, or blocks are lost
    OUTPUT = 5  # a client gets a wrong answer, and cannot see it


@dataclass(frozen=True, slots=True)
class Finding:
    """`curl`: the request that shows a failure."""

    question: str
    severity: Severity
    outcome: Outcome
    why: str
    curl: str = ""

    def __post_init__(self) -> None:
        if len(self.why) > MAX_WHY:
            object.__setattr__(self, "why", self.why[: MAX_WHY - 3] + "...")


@dataclass(frozen=True, slots=True)
class Question:
    """Makes the findings of one question."""

    name: str
    severity: Severity

    def holds(self, why: str) -> Finding:
        return Finding(self.name, self.severity, Outcome.HOLDS, why)

    def fails(self, why: str, curl: str = "") -> Finding:
        return Finding(self.name, self.severity, Outcome.FAILS, why, curl)

    def not_shown(self, why: str) -> Finding:
        return Finding(self.name, self.severity, Outcome.NOT_SHOWN, why)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing fails; what was not shown changes nothing."""
    return max((finding.severity for finding in findings if finding.outcome is Outcome.FAILS), default=0)


def curl_of(endpoint: Endpoint, call: Call) -> str:
    """A line for a shell. The key is left out: the line ends up in reports."""
    words = ["curl", "-sN", f"{endpoint.url}{call.path}"]
    for name, value in call.headers:
        words += ["-H", f"{name}: {value}"]
    line = shlex.join(words)
    if endpoint.key:
        line += ' -H "authorization: Bearer $KEY"'
    if call.body:
        line += f" -H 'content-type: application/json' -d {shlex.quote(call.body.decode(errors='replace'))}"
    return line


def json_body(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()  # ASCII, so a name from the stack cannot hold a control character
