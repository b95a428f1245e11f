"""The systemd units and deploy/compose.yaml: each program knows every word of them, and a stop drains first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.commands_of_docs import check_command
from tests.support.units import FOLDER, INSTALLED, Unit, seconds

WORKERS = "tandem-worker@.service"
HEAD = "10.0.0.1:6379"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze not installed")


def verified(folder: Path, misspelt: tuple[str, str] = ("", "")) -> str:
    """What systemd says about the units, with the programs of this interpreter in place of the installed ones."""
    for unit in FOLDER.glob("*.service"):
        text = unit.read_text(encoding="utf-8").replace(INSTALLED, sys.prefix)
        (folder / unit.name).write_text(text.replace(*misspelt) if misspelt[0] else text, encoding="utf-8")
    names = ("tandem-head.service", "tandem.service", "tandem-worker@prefill.service", "tandem-worker@decode.service")
    command = ["systemd-analyze", "verify", "--man=no", *(str(folder / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_knows_every_word(tmp_path: Path) -> None:
    assert verified(tmp_path) == ""


@needs_systemd
def test_systemd_finds_a_misspelt_word(tmp_path: Path) -> None:
    assert "KilMode" in verified(tmp_path, ("KillMode", "KilMode"))


def test_a_worker_machine_offers_its_places_to_one_pool() -> None:
    options = {"HEAD": HEAD, "PLACES": "8", "RAY_OPTIONS": "--node-ip-address 10.0.0.2"}
    command = Unit.read(WORKERS, "decode").command(**options)
    assert json.loads(command[command.index("--resources") + 1]) == {"decode": 8}
    assert command[-2:] == ["--node-ip-address", "10.0.0.2"]
    assert command[command.index("--address") + 1] == HEAD
    check_command(command)


def test_the_head_runs_ray_and_the_fleet_in_two_units() -> None:
    head, fleet = Unit.read("tandem-head.service"), Unit.read("tandem.service")
    check_command(head.command())
    assert head.command()[-1] == "100000000", "an option that machine.env leaves empty is no argument"
    check_command(fleet.command(HEAD=HEAD))
    assert fleet.settings["BindsTo"] == head.name, "the fleet ends with Ray"


def test_the_example_of_a_machine_names_every_variable_that_the_units_read() -> None:
    lines = (FOLDER / "machine.env").read_text(encoding="utf-8").splitlines()
    machine = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for unit in (Unit.read(WORKERS, "prefill"), Unit.read("tandem-head.service"), Unit.read("tandem.service")):
        assert unit.settings["EnvironmentFile"] == "/etc/tandem/machine.env"
        check_command(unit.command(**machine))


def test_a_stop_reaches_only_the_first_process_and_outlasts_the_drain() -> None:
    for name in (path.name for path in FOLDER.glob("*.service")):
        assert Unit.read(name).settings["KillMode"] == "mixed", name
    worker = Unit.read(WORKERS)
    drain_s = seconds(worker.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert seconds(worker.settings["TimeoutStopSec"]) >= drain_s + 10


# ---- deploy/compose.yaml: Compose and the programs know every word of them, and a stop drains before it kills

MACHINES = Path(__file__).resolve().parents[3] / "deploy/compose.yaml"

needs_compose = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose not installed")


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


@needs_compose
def test_compose_finds_a_misspelt_word(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(MACHINES.read_text(encoding="utf-8").replace("healthcheck:", "healthchek:"), encoding="utf-8")
    done = compose(wrong)
    assert done.returncode != 0
    assert "healthchek" in done.stderr


@needs_compose
def test_without_a_token_nothing_starts() -> None:
    done = compose(token="")
    assert done.returncode != 0
    assert "RAY_AUTH_TOKEN" in done.stderr


@needs_compose
def test_the_programs_know_every_option(services: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        check_command([*services[name]["entrypoint"], *services[name]["command"]])
        assert services[name]["command"] == [f'{{"{name}": 1}}']
    ray, fleet = services["head"]["command"][0].split(" && exec ")
    check_command(ray.split())
    check_command(fleet.split())


@needs_compose
def test_the_grace_exceeds_the_drain(services: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        drain_s = float(services[name]["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace = services[name]["stop_grace_period"]
        minutes, _, rest = grace.rpartition("m")
        assert 60 * float(minutes or 0) + seconds(rest) >= drain_s + 10
