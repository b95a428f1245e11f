"""The systemd units of deploy/systemd: their commands and variables, as systemd passes them to a program."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
INSTALLED = "/opt/tandem/.venv"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit file; `instance` replaces %i."""

    name: str
    settings: dict[str, str]

    @classmethod
    def read(cls, name: str, instance: str = "") -> Unit:
        text = (FOLDER / name).read_text(encoding="utf-8").replace("\\\n", "").replace("%i", instance)
        lines = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
        return cls(name, {key: value for key, _, value in lines})

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in shlex.split(self.settings["Environment"]))

    def command(self, **machine: str) -> list[str]:
        """The arguments of ExecStart on a machine with these variables, with the programs of this interpreter."""
        return self._expanded(self.environment | machine)

    def _expanded(self, variables: Mapping[str, str]) -> list[str]:
        arguments: list[str] = []
        for word in shlex.split(self.settings["ExecStart"]):
            if word.startswith("$") and not word.startswith("${"):
                arguments += variables.get(word[1:], "").split()  # an unset variable is no argument
            else:
                arguments.append(_VARIABLE.sub(lambda found: variables[found[1]], word))
        return [argument.replace(f"{INSTALLED}/bin", str(Path(sys.executable).parent)) for argument in arguments]


def seconds(value: str) -> float:
    return float(value.removesuffix("s"))
