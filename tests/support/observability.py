"""The files of deploy/observability: queries of dashboards and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
BOARDS = sorted((FOLDER / "grafana/dashboards").glob("*.json"))
RULES = sorted((FOLDER / "rules").glob("*.yml"))
_COMPARISON = re.compile(r"^(.*\S)\s*[<>]=?\s*[\d.]+$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    board: str
    panel: str
    expression: str
    legend: str


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets() -> Iterator[Target]:
    for path in BOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield Target(path.stem, panel["title"], target["expr"], target["legendFormat"])


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in read_yaml(path)["groups"]:
            yield from group["rules"]


def compared(alert: dict[str, Any]) -> str:
    """The expression of an alert without its comparison, which has a value while the alert is silent, too."""
    found = _COMPARISON.match(alert["expr"])
    assert found, f"{alert['alert']} must end in a comparison with one number"
    return found[1]
