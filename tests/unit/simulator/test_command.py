"""`python -m simulator` prints the command that replays a failed seed."""

from __future__ import annotations

import pytest

from simulator import __main__ as simulator_command


def test_the_simulator_prints_the_command_that_replays_a_failed_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(seed: int, *_: object, **__: object) -> None:
        raise AssertionError(f"seed {seed} is broken")

    monkeypatch.setattr(simulator_command, "run_seed", broken)
    assert simulator_command.main(["--harsh", "--seeds", "7..8"]) == 1
    assert "python -m simulator --harsh --seed 8 --verbose" in capsys.readouterr().err
