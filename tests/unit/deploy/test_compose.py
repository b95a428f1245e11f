"""deploy/compose.yaml: Compose and the programs know every word of them, and a stop drains before it kills."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.commands_of_docs import check_command
from tests.support.units import seconds

MACHINES = Path(__file__).resolve().parents[3] / "deploy/compose.yaml"

pytestmark = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose not installed")


def compose(path: Path = MACHINES, token: str = "secret") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"]} | ({"RAY_AUTH_TOKEN": token} if token else {})
    command = ("docker-compose", "--file", str(path), "config")
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose()
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def test_compose_finds_a_misspelt_word(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(MACHINES.read_text(encoding="utf-8").replace("healthcheck:", "healthchek:"), encoding="utf-8")
    done = compose(wrong)
    assert done.returncode != 0
    assert "healthchek" in done.stderr


def test_without_a_token_nothing_starts() -> None:
    done = compose(token="")
    assert done.returncode != 0
    assert "RAY_AUTH_TOKEN" in done.stderr


def test_the_programs_know_every_option(services: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        check_command([*services[name]["entrypoint"], *services[name]["command"]])
        assert services[name]["command"] == [f'{{"{name}": 1}}']
    ray, fleet = services["head"]["command"][0].split(" && exec ")
    check_command(ray.split())
    check_command(fleet.split())


def test_the_grace_exceeds_the_drain(services: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        drain_s = float(services[name]["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace = services[name]["stop_grace_period"]
        minutes, _, rest = grace.rpartition("m")
        assert 60 * float(minutes or 0) + seconds(rest) >= drain_s + 10
