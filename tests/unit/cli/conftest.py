"""The `tandem` command in the process of a test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from cli.main import run


class Ended(NamedTuple):
    code: object  # None: success
    out: str
    err: str


Tandem = Callable[..., Ended]


def connection_to(router: object) -> Any:
    """What a command gets in place of an `AsyncClient`."""
    return contextlib.nullcontext(router)


@pytest.fixture
def tandem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tandem:
    """Runs a command to its end."""

    def run_command(*arguments: str) -> Ended:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        return Ended(ended.value.code, *capsys.readouterr())

    return run_command
