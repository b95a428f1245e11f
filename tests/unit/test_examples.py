"""The Node modules of the examples come from wherever npm is told to look."""

from __future__ import annotations

import json
from pathlib import Path

NODE = Path(__file__).parents[2] / "examples/node"


def test_the_lock_file_pins_every_module_and_names_no_registry() -> None:
    packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
    wanted = json.loads((NODE / "package.json").read_text())["dependencies"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert all("resolved" not in package for package in packages.values())
    assert all("integrity" in package for name, package in packages.items() if name)
