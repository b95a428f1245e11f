"""The README of examples/ lists every program, and their Node modules come from wherever npm is told to look."""

from __future__ import annotations

import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_readme_lists_every_program() -> None:
    listed = set(re.findall(r"`([\w/]+\.(?:py|js|sh))`", (EXAMPLES / "README.md").read_text()))
    found = [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".js", ".sh")]
    assert listed == {str(path) for path in found if "node_modules" not in path.parts}


def test_the_lock_file_pins_every_module_and_names_no_registry() -> None:
    packages = json.loads((EXAMPLES / "node/package-lock.json").read_text())["packages"]
    wanted = json.loads((EXAMPLES / "node/package.json").read_text())["dependencies"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert all("resolved" not in package for package in packages.values())
    assert all("integrity" in package for name, package in packages.items() if name)
