"""Ctrl-C, SIGTERM and SIGHUP of the commands that serve: the first one drains, the second one ends the process at once.

Of a closed terminal, kernel and shell may each send a SIGHUP: a further one does nothing while the task runs.

before the loop runs    KeyboardInterrupt, then `close`
while the task runs     the first one cancels the task, the second one ends the process
afterwards              the process ends
while Python ends       nothing
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from cli.exit_codes import INTERRUPTED
from runtime.line_writer import write_last_lines

LOOK_S = 0.5  # between two wakes of the loop: a signal that another thread takes, or just before a wait, wakes nothing
STOPS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
    STOPS.append(signal.SIGHUP)

PrintLine = Callable[[str], None]


class Interrupts:
    """The first of `STOPS` cancels the task; the second calls `end` and ends the process at once.

    After the end of the task any of them ends the process. A handler of the loop would be gone by then: SIGTERM would
    end the process with no exit code of its own.
    """

    def __init__(self, task: asyncio.Task[None], print_line: PrintLine, end: Callable[[], None]) -> None:
        self._task, self._print_line, self._end = task, print_line, end
        self._loop = asyncio.get_running_loop()
        self.count = 0
        for number in STOPS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        """Runs between any two lines of the main thread."""
        if self._task.done():
            _exit_at_once()
        self._loop.call_soon_threadsafe(self._stop, number)

    def _stop(self, number: int) -> None:
        if self.count and number == signal.SIGHUP:
            return
        self.count += 1
        if self.count == 1:
            self._print_line("draining; a second Ctrl-C stops at once")
            self._task.cancel()
            return
        self._end()
        _exit_at_once()


def run_interruptible(
    main: Callable[[], Coroutine[Any, Any, None]],
    print_line: PrintLine,
    end: Callable[[], None] = lambda: None,
    run: Callable[[Coroutine[Any, Any, bool]], bool] = asyncio.run,
) -> bool:
    """Run `main`, which `Interrupts` may cancel, on the loop of `run`. Returns whether it was interrupted."""

    async def supervised() -> bool:
        task = asyncio.create_task(main())
        interrupts = Interrupts(task, print_line, end)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_S)
            await task
        except asyncio.CancelledError:
            if interrupts.count == 0:
                raise
        return interrupts.count > 0

    handlers = [signal.getsignal(number) for number in STOPS]
    try:
        return run(supervised())
    finally:
        for number, handler in zip(STOPS, handlers, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible(close: Callable[[], None]) -> Iterator[None]:
    """One of `STOPS` ends the body by `KeyboardInterrupt`. `close` follows any end; another one ends the process."""
    for number in STOPS[1:]:  # Python's own handler of Ctrl-C
        signal.signal(number, signal.default_int_handler)
    atexit.register(_ignore_stops)  # the first to be registered is the last to be called
    try:
        yield
    finally:
        for number in STOPS:
            signal.signal(number, _exit_at_once)
        close()


def _ignore_stops() -> None:
    """While Python ends, a signal has its default action again, unless it is ignored: SIGTERM gave exit code -15."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _exit_at_once(*_: object) -> None:
    write_last_lines()
    with contextlib.suppress(RuntimeError, OSError):  # the interrupted line writes; nobody reads
        sys.stdout.flush()
    os._exit(INTERRUPTED)
