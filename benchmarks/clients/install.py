"""Installs each client into an environment of its own under <cache>/tandem/clients; nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine.install_peers import InstallFailed, install, run
from model_files.catalogue import default_cache_dir

OPENAI_PYTHON, OPENAI_NODE = "3.54.0", "6.49.0"
AIPERF, GUIDELLM = "0.13.0", "0.8.1"
TORCH = "2.13.0"  # before guidellm, which would fetch a build for GPUs


def clients_dir() -> Path:
    return default_cache_dir() / "clients"


def directory_of(name: str, version: str) -> Path:
    return clients_dir() / f"{name}-{version}"


def python_of(name: str, version: str) -> Path:
    return directory_of(name, version) / "bin" / "python"


def _with_pip(*packages: str) -> Callable[[Path], None]:
    """Installs the packages one after the other into a virtual environment."""

    def steps(directory: Path) -> None:
        run("making a virtual environment", [sys.executable, "-m", "venv", directory])
        for package in packages:
            quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
            run(f"installing {package}", [directory / "bin" / "python", "-m", "pip", "install", *quiet, package])

    return steps


def _with_npm(package: str) -> Callable[[Path], None]:
    def steps(directory: Path) -> None:
        (directory / "package.json").write_text('{"private": true, "type": "module"}\n')
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        run(f"installing {package}", ["npm", "install", *quiet, package], cwd=directory)

    return steps


STEPS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("openai-python", OPENAI_PYTHON): _with_pip(f"openai=={OPENAI_PYTHON}"),
    ("openai-node", OPENAI_NODE): _with_npm(f"openai@{OPENAI_NODE}"),
    ("aiperf", AIPERF): _with_pip(f"aiperf=={AIPERF}"),
    ("guidellm", GUIDELLM): _with_pip(f"torch=={TORCH}", f"guidellm=={GUIDELLM}"),
}


def install_client(name: str, version: str) -> str:
    """The reason why the client cannot be installed; empty if it is installed."""
    try:
        install(directory_of(name, version), STEPS[name, version])
    except InstallFailed as reason:
        return str(reason)
    return ""
