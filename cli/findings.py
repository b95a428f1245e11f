"""Findings of `tandem doctor`. FAIL: Tandem does not work on this machine. WARN: Tandem is slow or fragile on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    OK = "[green]ok[/]"
    WARN = "[yellow]WARN[/]"
    FAIL = "[red]FAIL[/]"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    health: Health
    text: str
    fix: str = ""  # what to do; empty if nothing is wrong


def judge(good: bool, subject: str, text: str, fix: str, otherwise: Health = Health.WARN) -> Finding:
    return Finding(subject, Health.OK, text) if good else Finding(subject, otherwise, text, fix)
