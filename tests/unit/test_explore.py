"""`make explore` draws other examples each time, reports what fails, and names the command that replays a failure."""

from __future__ import annotations

import pytest
from hypothesis import settings

from simulator import __main__ as simulator_command
from tests.tools import explore
from tests.tools.explore import hypothesis_files, rounds


def test_no_test_decides_for_itself_whether_its_examples_are_random() -> None:
    texts = {file: (explore.ROOT / file).read_text() for file in hypothesis_files()}
    assert len(texts) > 10
    assert [file for file, text in texts.items() if "derandomize" in text or "database=" in text] == []
    assert not settings.get_profile("explore").derandomize


def test_rounds_go_over_every_file_of_hypothesis_tests_and_over_every_kind_of_world() -> None:
    commands = [command for command, _ in zip(rounds(), range(3 * len(hypothesis_files())), strict=False)]
    assert sorted(command[-1] for command in commands[::3]) == hypothesis_files()
    assert {command[2] for command in commands[2::3]} == {"tests.tools.fuzz"}
    assert {command[3] for command in commands[1::3]} == {"--harsh", "--vllm", "--seeds"}
    seeds = [argument for command in commands for argument in command if "seed=" in argument or ".." in argument]
    assert len(set(seeds)) == len(commands)


def test_a_failed_round_is_printed_with_its_command_and_does_not_end_the_exploration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = ["python", "-c", "import sys; sys.exit('token 7 is wrong')"]
    failed = explore.explore([failing, ["python", "-c", "pass"]], minutes=1.0)
    assert failed == ["""python -c 'import sys; sys.exit('"'"'token 7 is wrong'"'"')'"""]
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "token 7 is wrong" in out
    assert out.splitlines()[-1].startswith("ok")


def test_a_round_without_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "ROUND_TIMEOUT_S", 0.2)
    assert explore.explore([["python", "-c", "import time; time.sleep(60)"]], minutes=0.0)


def test_the_simulator_prints_the_command_that_replays_a_failed_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(seed: int, *_: object, **__: object) -> None:
        raise AssertionError(f"seed {seed} is broken")

    monkeypatch.setattr(simulator_command, "run_seed", broken)
    assert simulator_command.main(["--harsh", "--seeds", "7..8"]) == 1
    assert "python -m simulator --harsh --seed 8 --verbose" in capsys.readouterr().err
