"""Every package that is shipped is in the image of deploy/Dockerfile and on a floor of the house."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
SHIPPED = {name.rstrip("*") for name in PROJECT["setuptools"]["packages"]["find"]["include"]}


def test_the_image_contains_the_packages_of_pyproject_and_no_others() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (\w+) (\w+)$", dockerfile, re.MULTILINE)
    assert [(source, target) for source, target in copied if source != target] == []
    assert sorted(source for source, _ in copied) == sorted({*SHIPPED, "deploy"})


def test_the_pins_that_the_image_for_gpus_leaves_out_are_in_constraints() -> None:
    """Else pip takes the pins of CPUs beside a torch that excludes them, and the image cannot be built."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (script,) = re.findall(r"sed -i '(.*)' constraints\.txt", dockerfile)
    patterns = re.findall(r"/(.+?)/d", script)
    assert len(patterns) == 2
    for pattern in patterns:
        assert len(re.findall(pattern, constraints, re.MULTILINE)) == 1, f"no pin matches {pattern}"


def test_every_package_that_is_shipped_stands_on_a_floor() -> None:
    """`make check` holds the floors: import-linter reads them from pyproject.toml."""
    layers = next(each["layers"] for each in PROJECT["importlinter"]["contracts"] if each["type"] == "layers")
    on_floors = {name for layer in layers for name in layer.split(" | ")}
    assert SHIPPED == set(PROJECT["importlinter"]["root_packages"]) == on_floors
