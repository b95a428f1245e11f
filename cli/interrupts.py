"""Ctrl-C and SIGTERM of the commands that serve: the first one drains, the second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from cli.exit_codes import INTERRUPTED

PrintLine = Callable[[str], None]


class Interrupts:
    """The first Ctrl-C or SIGTERM cancels the task; the second calls `end` and ends the process at once."""

    def __init__(self, task: asyncio.Task[None], print_line: PrintLine, end: Callable[[], None]) -> None:
        self._task, self._print_line, self._end = task, print_line, end
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.count += 1
        if self.count == 1:
            self._print_line("draining; a second Ctrl-C stops at once")
            self._task.cancel()
            return
        self._end()
        sys.stdout.flush()
        os._exit(INTERRUPTED)


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
            await task
        except asyncio.CancelledError:
            if interrupts.count == 0:
                raise
        return interrupts.count > 0

    return run(supervised())
