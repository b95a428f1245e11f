"""Lets nothing outlive this process, however it ends.

Ray's own processes notice a dead parent after up to a minute. The reaper is one small child in a session of its own: it
is told the ids of processes, waits for the end of its standard input, which the kernel closes when the parent is gone
(`kill -9` too), and then kills those that are still the same processes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil

CLOSE_TIMEOUT_S = 5.0


class Reaper:
    """The parent's side. Start it before the children it shall watch."""

    def __init__(self) -> None:
        # -P: the directory of this file holds modules whose names must not hide others.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch_children(self) -> None:
        """Every process below this one, as of now, ends with it."""
        children = psutil.Process().children(recursive=True)
        self.watch([child.pid for child in children if child.pid != self._process.pid])

    def watch(self, pids: list[int]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the reaper: the rest goes on without it
            self._process.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill what is left of the watched processes now. May be called more than once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    watched: list[psutil.Process] = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended before we came to look
            watched.append(psutil.Process(int(line)))
    for process in watched:
        with contextlib.suppress(psutil.NoSuchProcess):  # also where its id belongs to another process by now
            process.kill()


if __name__ == "__main__":
    main()
