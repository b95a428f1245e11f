"""Findings of `tandem doctor`. FAIL: Tandem does not work on this machine. WARN: Tandem is slow or fragile on it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Version = Callable[[str], str]  # of an installed package; raises PackageNotFoundError


class Health(Enum):
    OK = "ok"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    health: Health
    text: str
    fix: str = ""  # what to do; empty if nothing is wrong


def judge(good: bool, subject: str, text: str, fix: str, otherwise: Health = Health.WARN) -> Finding:
    return Finding(subject, Health.OK, text) if good else Finding(subject, otherwise, text, fix)


def version_of(package: str, version: Version = importlib.metadata.version) -> str:
    """Empty if the package is not installed."""
    try:
        return version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_installed(
    package: str, fix: str, otherwise: Health, version: Version = importlib.metadata.version
) -> Finding:
    found = version_of(package, version)
    return judge(bool(found), package, found or "not installed", fix, otherwise)
