"""The floors of the house: the contracts of pyproject.toml hold here, and each of them is able to break."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
CONTRACTS = [contract["name"] for contract in PROJECT["tool"]["importlinter"]["contracts"]]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    command = [str(lint_imports), "--config", "pyproject.toml", "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Contract -> KEPT or BROKEN. Lines wrap, so they are joined first."""
    output = " ".join(done.stdout.split())
    found = {}
    for name in CONTRACTS:
        assert name in output, f"{name!r} was not checked:\n{done.stdout}\n{done.stderr}"
        found[name] = output.partition(name)[2].split()[0]
    return found


def test_every_package_that_is_shipped_stands_on_a_floor() -> None:
    shipped = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    layers = next(c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    assert shipped == set(PACKAGES) == {name for layer in layers for name in layer.split(" | ")}


def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert verdicts(done) == dict.fromkeys(CONTRACTS, "KEPT"), done.stdout
    assert done.returncode == 0


# ---- a contract that cannot break proves nothing: each is broken once in a small copy of the house


@pytest.fixture
def small_house(tmp_path: Path) -> Path:
    for package in [*PACKAGES, "kv_transfer/transports", "engine/cpu"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "engine/backend.py").write_text("import engine.cpu\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


FLOORS, PURE, TORCH, RAY, ROUTER, CLIENT, SIMULATOR, KERNELS = CONTRACTS
BREACHES = [
    ("core/sly.py", "import runtime", FLOORS),
    ("runtime/sly.py", "from router import anything", FLOORS),
    ("engine/sly.py", "import kv_transfer", FLOORS),
    ("kv_transfer/sly.py", "import engine", FLOORS),
    ("router/sly.py", "def late():\n    import decode_worker", FLOORS),
    ("core/sly.py", "from time import monotonic", PURE),
    ("core/sly.py", "import random", PURE),
    ("core/sly.py", "import asyncio.events", PURE),
    ("core/sly.py", "import threading", PURE),
    ("core/sly.py", "import socket", PURE),
    ("cli/sly.py", "import torch", TORCH),
    ("kv_transfer/sly.py", "import torch.nn", TORCH),
    ("runtime/sly.py", "import ray", RAY),
    ("decode_worker/sly.py", "import ray.util", RAY),
    ("router/sly.py", "from worker import core", ROUTER),
    ("tandem_client/sly.py", "import core", CLIENT),
    ("simulator/sly.py", "from kv_transfer import transports", SIMULATOR),
    ("simulator/sly.py", "import grpc", SIMULATOR),
    ("engine/sly.py", "import engine.cpu", KERNELS),
]


def test_the_small_house_is_in_order(small_house: Path) -> None:
    assert verdicts(lint(small_house)) == dict.fromkeys(CONTRACTS, "KEPT")


@pytest.mark.parametrize(("path", "program", "contract"), BREACHES)
def test_a_breach_is_seen(small_house: Path, path: str, program: str, contract: str) -> None:
    (small_house / path).write_text(program + "\n")
    done = lint(small_house)
    assert verdicts(done)[contract] == "BROKEN", done.stdout
    assert done.returncode == 1
