"""Runs one machine on the asyncio loop: events in, actions out, one timer.

The driver is the only caller of its machine, always on the loop's thread, so the machine needs no lock. A machine that
raises anything but a `TandemError` has a bug; its state can no longer be trusted, so the driver stops and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from core.errors import TandemError, WorkerUnavailable
from core.machine import Machine, Tick

E = TypeVar("E")
A = TypeVar("A")

logger = logging.getLogger(__name__)


class Driver(Generic[E, A]):
    """`perform` acts on one action, `on_handled` follows the last one of an event; neither may block.

    `on_fatal` is called once if the machine fails.
    """

    def __init__(
        self,
        machine: Machine[E | Tick, A],
        perform: Callable[[A], None],
        on_fatal: Callable[[BaseException], None],
        on_handled: Callable[[], None] = lambda: None,
    ) -> None:
        self.machine = machine
        self._perform = perform
        self._on_fatal = on_fatal
        self._on_handled = on_handled
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False

    def now(self) -> float:
        """Seconds on the loop's monotonic clock, the machine's only notion of time."""
        return self._loop.time()

    def post(self, event: E | Tick) -> None:
        """Hand one event to the machine and perform what it decides. Call on the loop's thread.

        Dropped once the driver has stopped: for news. Raises `TandemError` where the machine refuses the event.
        """
        if self.stopped:
            return
        try:
            actions = self.machine.handle(event, self.now())
        except TandemError:
            raise  # the event itself is refused and has left no trace; whoever posted it is told
        except Exception as error:
            self.stop()
            logger.critical("the machine failed on %s", type(event).__name__, exc_info=error)
            self._on_fatal(error)
            raise
        for action in actions:
            self._perform(action)
        self._on_handled()
        self._set_timer()

    def ask(self, event: E | Tick) -> None:
        """`post` an event whose sender waits for what follows.

        Raises `WorkerUnavailable` once the driver has stopped: nothing would ever follow. Whoever makes the machine
        fail gets a plain `TandemError`, which nobody retries: it might bring down one worker after the other.
        """
        if self.stopped:
            raise WorkerUnavailable("this process stops, or has failed")
        try:
            self.post(event)
        except TandemError:
            raise
        except Exception as error:  # logged by `post`, and the end of this machine
            raise TandemError(f"the machine failed on this call: {type(error).__name__}") from error

    def post_threadsafe(self, event: E | Tick) -> None:
        """`post` from another thread; returns at once. Dropped where nobody is there any more to take it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def stop(self) -> None:
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        """Most events leave the next deadline where it was; then the timer stays."""
        deadline = None if self.stopped else self.machine.next_deadline()
        if self._timer is not None:
            if self._timer.when() == deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())
