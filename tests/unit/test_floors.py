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


# ---- a contract that cannot break proves nothing: each is broken in a small copy of the house


def small_house(root: Path) -> None:
    for package in [*PACKAGES, "kv_transfer/transports", "engine/cpu", "engine/gpu"]:
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for module in (ROOT / "tandem_client").glob("*.py"):
        (root / "tandem_client" / module.name).touch()
    (root / "engine/backend.py").write_text("import engine.cpu\n")
    (root / "engine/factory.py").write_text("import engine.gpu\n")
    shutil.copy(ROOT / "pyproject.toml", root)


FLOORS, PURE, TORCH, RAY, ROUTER, CLIENT, GATEWAY, STUBS, SIMULATOR, KERNELS = CONTRACTS
BREACHES = [
    ("core", "import runtime", FLOORS),
    ("runtime", "from router import anything", FLOORS),
    ("engine", "import kv_transfer", FLOORS),
    ("kv_transfer", "import engine", FLOORS),
    ("router", "def late():\n    import decode_worker", FLOORS),
    ("core", "from time import monotonic", PURE),
    ("core", "import random", PURE),
    ("core", "import asyncio.events", PURE),
    ("core", "import threading", PURE),
    ("core", "import socket", PURE),
    ("cli", "import torch", TORCH),
    ("kv_transfer", "import torch.nn", TORCH),
    ("runtime", "import ray", RAY),
    ("decode_worker", "import ray.util", RAY),
    ("router", "from worker import core", ROUTER),
    ("tandem_client", "import core", CLIENT),
    ("gateway", "import router", GATEWAY),
    ("gateway", "import protos", GATEWAY),
    ("gateway", "from tandem_client import client", STUBS),
    ("router", "from tandem_client.errors import CallFailed", STUBS),
    ("simulator", "from kv_transfer import transports", SIMULATOR),
    ("simulator", "import grpc", SIMULATOR),
    ("engine", "import engine.cpu", KERNELS),
    ("engine", "import engine.gpu", KERNELS),
]


def test_the_small_house_is_in_order(tmp_path: Path) -> None:
    small_house(tmp_path)
    assert verdicts(lint(tmp_path)) == dict.fromkeys(CONTRACTS, "KEPT")


@pytest.fixture(scope="module")
def breaches_seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one run says of each contract when every breach stands in a module of its own."""
    root = tmp_path_factory.mktemp("house")
    small_house(root)
    for number, (package, program, _) in enumerate(BREACHES):
        (root / package / f"sly_{number}.py").write_text(program + "\n")
    done = lint(root)
    assert done.returncode == 1
    assert verdicts(done) == dict.fromkeys(CONTRACTS, "BROKEN"), done.stdout
    details = " ".join(done.stdout.partition("Broken contracts")[2].split())
    starts = sorted((details.index(name), name) for name in CONTRACTS)
    ends = [start for start, _ in starts[1:]] + [len(details)]
    return {name: details[start:end] for (start, name), end in zip(starts, ends, strict=True)}


@pytest.mark.parametrize(("number", "breach"), list(enumerate(BREACHES)))
def test_a_breach_is_seen(breaches_seen: dict[str, str], number: int, breach: tuple[str, str, str]) -> None:
    package, program, contract = breach
    assert f"{package}.sly_{number} -> " in breaches_seen[contract], f"{program!r} passes"
