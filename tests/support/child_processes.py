"""The processes that tests and benchmarks start: programs that obey commands, and servers that only run.

    ChildProcess    starts a program, sends it commands, reads its answers; `take_stdout` and `obey` are the other end
    serving         runs a server from its ready line to the end of the block; `tandem` runs `tandem serve`

Commands and answers are JSON, one a line: {"do": NAME, ...} calls a method with the other fields. The first answer says
that the program is ready. A program ends with its standard input. This file needs the standard library alone, because
vLLM's environment imports it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

START_TIMEOUT_S = 600.0  # until a program is ready: a vLLM engine may compile its model
STOP_TIMEOUT_S = 20.0
SERVER_STOP_TIMEOUT_S = 120.0
LAST_LINES = 8  # of the output of a program that ended
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
        core: int | None = None,
        log: IO[str] | None = None,
    ) -> None:
        """`environment` is added to that of this process. `core`: None = where the scheduler puts the program. `log`:
        takes its standard error, and is closed by `stop` unless it is that of this process; None = a temporary file."""
        self.name = name
        self._is_ready = False
        self._log = log or tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            [*pinned(core), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            cwd=directory, env=os.environ | dict(environment or {}),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, do: str, **arguments: Any) -> Any:
        """The answer to a command. Raises `ChildEnded` where the program ends instead of answering."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` takes its answer."""
        self.wait_until_ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` finds the end of the program and reports why
            self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Raises `ChildEnded`, also where the program takes longer than `START_TIMEOUT_S`."""
        if not self._is_ready:
            limit = threading.Timer(START_TIMEOUT_S, self._process.kill)
            limit.start()
            try:
                self.answer()
            finally:
                limit.cancel()
            self._is_ready = True

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            last_lines = []
            if self._log.readable():
                self._log.seek(0)
                last_lines = self._log.read().strip().splitlines()[-LAST_LINES:]
            raise ChildEnded(f"{self.name} ended: " + " | ".join(last_lines))
        return json.loads(line)

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def kill(self) -> int:
        """Returns its exit code: -9, unless it has ended before."""
        self._process.kill()
        return self._process.wait()

    def stop(self) -> None:
        """Close the input of the program, which ends it; kill it after `STOP_TIMEOUT_S`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a command that the program never read
            self._process.stdin.close()
        end(self._process)
        self._process.stdout.close()
        if self._log is not sys.__stderr__:
            self._log.close()


def pinned(core: int | None) -> list[str]:
    return [] if core is None else ["taskset", "--cpu-list", str(core)]


def end(process: subprocess.Popen[Any]) -> None:
    """Wait for a process that was asked to end; kill it after `STOP_TIMEOUT_S`, or when Ctrl-C breaks off the wait."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()


@contextlib.contextmanager
def group_killed(process: subprocess.Popen[Any]) -> Iterator[None]:
    """However the block ends, also by a second Ctrl-C, kill what is left of the group that `process` leads."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_s(process_id: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


# ---- the program's side


def take_stdout() -> TextIO:
    """Standard output for the answers alone: what libraries print goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def obey(target: Any, answers: TextIO) -> None:
    """Each public method of `target` is a command."""
    print("{}", file=answers)  # ready
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(target, command.pop("do"))(**command)), file=answers)


async def obey_on_loop(target: Any, answers: TextIO) -> None:
    """As `obey`, on the loop of `target`. A command may be a coroutine; the next command waits for its end."""
    print("{}", file=answers)  # ready
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        found = getattr(target, command.pop("do"))(**command)
        print(json.dumps(await found if inspect.isawaitable(found) else found), file=answers)


# ---- servers


@contextlib.contextmanager
def serving(
    command: Sequence[str | Path], ready: str, environment: Mapping[str, str] = {}, core: int | None = None
) -> Iterator[int]:
    """Run a server and its children from the line of output that the pattern `ready` finds to the end of the block;
    empty = at once. Yields its process id. Raises `RuntimeError` with the last lines if it does not start within
    `START_TIMEOUT_S`."""
    process = subprocess.Popen(
        [*pinned(core), *command], env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, process_group=0,
    )  # fmt: skip
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    started = threading.Event()  # or the server has ended
    is_ready = not ready

    def follow() -> None:
        """Read to the end: a full pipe would stop the server."""
        nonlocal is_ready
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                last_lines.append(line.strip())
                if re.search(ready, line):
                    is_ready = True
                    started.set()
        started.set()

    reader = threading.Thread(target=follow, daemon=True)
    with group_killed(process):  # an engine of vLLM must not keep the memory of the GPU
        reader.start()
        try:
            if not (is_ready or (started.wait(START_TIMEOUT_S) and is_ready)):
                raise RuntimeError(f"the server did not start: {' | '.join(last_lines)}")
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SERVER_STOP_TIMEOUT_S)
            reader.join(STOP_TIMEOUT_S)  # until its children have ended, too


@contextlib.contextmanager
def tandem(port: int, *flags: str, config: str = "") -> Iterator[int]:
    """Run `tandem serve` as `serving` does. `config`: the text of its config file."""
    command = [sys.executable, "-m", "cli.main", "serve", "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(config)
        file.flush()
        with serving([*command, *(["--config", file.name] if config else [])], "^serving ") as process_id:
            yield process_id
