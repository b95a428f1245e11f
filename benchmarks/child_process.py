"""A measured program in a process of its own. Commands and answers are JSON objects, one a line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 20.0
LAST_LINES = 5  # of the output of a program that ended


class ChildEnded(Exception):
    """The program ended or did not start; the message has the last lines of its output."""


class ChildProcess:
    """Started at once. Ends with `stop`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        """`environment` is added to that of this process."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=directory,
            env=os.environ | dict(environment or {}),
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, command: Mapping[str, Any]) -> Any:
        """The answer to a command. Raises `ChildEnded`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` finds the end of the program and reports why
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next answer. Raises `ChildEnded`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last_lines = self._log.read().strip().splitlines()[-LAST_LINES:]
            raise ChildEnded(f"{self.name} ended: " + " | ".join(last_lines))
        return json.loads(line)

    def stop(self) -> None:
        """Close the input of the program, which ends it; kill it after `STOP_TIMEOUT_S`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a command that the program never read
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
