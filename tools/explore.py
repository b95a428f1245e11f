"""Looks for faults with fresh random seeds, for a given number of minutes: `make explore`.

`make test` draws the same examples every time. Here, each round runs one file of Hypothesis tests, one batch of the
simulator's seeds, with the kinds of worlds in turn, and some odd messages (tools/fuzz). Each line shows the
command of a round, with its seed: the same command replays the round. A failed round does not end the exploration.
"""

from __future__ import annotations

import argparse
import itertools
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

Command = list[str]

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/property", "tests/unit")
WORLDS: tuple[Command, ...] = ([], ["--harsh"], ["--vllm"])
NUM_SEEDS = 20  # of the simulator, in one round
NUM_MESSAGES = 5_000  # odd ones, in one round
ROUND_TIMEOUT_S = 600.0
TAIL_LINES = 60
PYTEST = ("python", "-m", "pytest", "-q", "-m", "hypothesis", "--timeout=500")  # a test may run 1,000 examples


def hypothesis_files() -> list[str]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in files if re.search(r"@given\(|\.TestCase", path.read_text()))


def rounds() -> Iterator[Command]:
    files = hypothesis_files()
    secrets.SystemRandom().shuffle(files)  # a short exploration does not always take the same files
    for number, file in enumerate(itertools.cycle(files)):
        seed = f"--hypothesis-seed={secrets.randbits(32)}"
        yield [*PYTEST, "--hypothesis-profile=explore", seed, file]
        first = secrets.randbits(32)
        seeds = f"{first}..{first + NUM_SEEDS - 1}"
        yield ["python", "-m", "simulator", *WORLDS[number % len(WORLDS)], "--seeds", seeds]
        yield ["python", "-m", "tools.fuzz", "--messages", str(NUM_MESSAGES), f"--seed={secrets.randbits(32)}"]


def explore(commands: Iterable[Command], minutes: float) -> list[str]:
    """Run commands until the time is over, at least one. Returns those that failed, as a shell takes them."""
    end = time.monotonic() + 60 * minutes
    failed = []
    for command in commands:
        shown, began_at = shlex.join(command), time.monotonic()
        output = _failure_of(command)
        print(f"{'ok' if output is None else 'FAILED':6} {time.monotonic() - began_at:5.1f} s  {shown}", flush=True)
        if output is not None:
            failed.append(shown)
            print("\n".join(output.splitlines()[-TAIL_LINES:]), flush=True)
        if time.monotonic() >= end:
            break
    return failed


def _failure_of(command: Command) -> str | None:
    """The output of a command that failed; None for a command that did not."""
    running = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    try:
        done = subprocess.run(
            running, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ROUND_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return f"{output}\nthe command did not end within {ROUND_TIMEOUT_S:.0f} s"
    return done.stdout if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="no round begins after this time")
    failed = explore(rounds(), parser.parse_args().minutes)
    if failed:
        sys.exit("\n".join([f"{len(failed)} rounds failed. Replay with", *failed]))


if __name__ == "__main__":
    main()
