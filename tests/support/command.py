"""The `tandem` command in a separate process, as a user runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]  # has the programs of tests; -P leaves the current directory out
PATIENCE_S = 120.0
STOPPED_WITHIN_S = 30.0


async def start(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("cli.main",),
    cwd: Path | None = None,
) -> Process:
    """Start `tandem` in a new session, so that a signal reaches no other process. `program`: another module in place of
    it, with arguments of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", *program, *arguments,
        stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, cwd=cwd,
        env=os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)} | dict(environment or {}),
    )  # fmt: skip


async def tandem(
    *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a command to its end. Returns (exit code, stdout, stderr)."""
    process = await start(*arguments, environment=environment)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode()


async def said(*arguments: str) -> str:
    """What a command that succeeds prints."""
    code, out, err = await tandem(*arguments)
    assert code == 0, err
    return out


@dataclass(frozen=True, slots=True)
class Served:
    process: Process
    address: str
    family: list[psutil.Process]  # all descendants, Ray's processes included

    async def ended(self) -> tuple[int, list[psutil.Process]]:
        """Wait for the end of `tandem serve`. Returns (exit code, processes that are left)."""
        code, left, _ = await self.ended_saying()
        return code, left

    async def ended_saying(self) -> tuple[int, list[psutil.Process], str]:
        """As `ended`, with the text of standard error."""
        async with asyncio.timeout(STOPPED_WITHIN_S):
            _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, await self.left(), err.decode()

    async def left(self) -> list[psutil.Process]:
        """Descendants that do not end in time."""
        _, left = await asyncio.to_thread(psutil.wait_procs, self.family, STOPPED_WITHIN_S)
        return left


@contextlib.asynccontextmanager
async def serving(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("cli.main",),
    cwd: Path | None = None,
) -> AsyncIterator[Served]:
    """`tandem serve` with a fake model of 2 ms a step, as soon as it serves. `program`: as of `start`.

    Its processes end with this context, also when the test fails.
    """
    process = await start(
        "serve", "--model", "fake:slow", "--port", "0", *arguments, environment=environment, program=program, cwd=cwd
    )
    try:
        yield Served(process, await _address(process), psutil.Process(process.pid).children(recursive=True))
    finally:
        if process.returncode is None:
            process.kill()  # Ray and all processes in it end, too
        await process.communicate()


async def _address(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            if line.startswith("serving"):
                return line.split(" at ")[1].split()[0]
    _, err = await process.communicate()
    raise AssertionError(f"`tandem serve` did not start: {err.decode()}")


@contextlib.asynccontextmanager
async def running(*command: str, wanted: str, environment: Mapping[str, str], cwd: Path) -> AsyncIterator[str]:
    """A program as soon as it has said `wanted`: gives that line. Its family ends with this context."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, limit=1 << 20
    )
    try:
        yield await line_with(process, wanted)
    finally:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 10)
        for straggler in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()


async def line_with(process: Process, wanted: str) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            seen.append(line)
            if wanted in line:
                return line
    raise AssertionError(f"it ended without saying {wanted!r}: {''.join(seen[-8:])}")
