"""Runs one machine on the asyncio loop: events in, actions out, one timer.

The driver is the only caller of its machine, always on the loop's thread, so the machine needs no lock.

A machine refuses an event by raising a `TandemError` before it changes anything. Every other exception is a bug: of the
machine, whose state can no longer be trusted, or of the shell, which has then performed only a part of what the machine
decided. The driver stops and calls `on_fatal`.
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

STOPPED = "this process stops, or has failed"

logger = logging.getLogger(__name__)


class Driver(Generic[E, A]):
    """`perform` acts on one action, `on_handled` follows the last one of an event; neither may block.

    `on_fatal` is called once if the machine, `perform` or `on_handled` fails.
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
        self._timer: asyncio.Handle | None = None
        self._timer_at: float | None = None  # when `_timer` fires
        self._refusal: tuple[type[TandemError], str] = WorkerUnavailable, STOPPED
        self.stopped = False

    def now(self) -> float:
        """Seconds on the loop's monotonic clock, the machine's only notion of time."""
        return self._loop.time()

    def post(self, event: E | Tick) -> None:
        """Hand one event to the machine and perform what it decides. Call on the loop's thread.

        Dropped once the driver has stopped: for news. Raises `TandemError` where the machine refuses the event, and
        whatever made the machine or the shell fail.
        """
        if self.stopped:
            return
        try:
            actions = self.machine.handle(event, self.now())
        except TandemError:
            raise
        except Exception as error:
            self._fail("the machine", event, error)
            raise
        try:
            for action in actions:
                self._perform(action)
            self._on_handled()
        except Exception as error:
            self._fail("the shell", event, error)
            raise
        self._set_timer()

    def _fail(self, part: str, event: E | Tick, error: Exception) -> None:
        self.stop()
        logger.critical("%s failed on %s", part, type(event).__name__, exc_info=error)
        self._on_fatal(error)

    def ask(self, event: E | Tick) -> None:
        """`post` an event whose sender waits for what follows.

        Raises the error of `stop` once the driver has stopped: nothing would ever follow. An event that makes the
        machine or the shell fail raises a plain `TandemError`, which nobody retries: a retry might bring down one
        worker after the other.
        """
        self.refuse_if_stopped()
        try:
            self.post(event)
        except Exception as error:
            if not self.stopped:
                raise  # the machine refused the event
            raise TandemError(f"this process failed on this call: {type(error).__name__}") from error

    def post_threadsafe(self, event: E | Tick) -> None:
        """`post` from another thread; returns at once. Dropped once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def refuse_if_stopped(self) -> None:
        if self.stopped:
            error, reason = self._refusal
            raise error(reason)

    def stop(self, error: type[TandemError] = WorkerUnavailable, reason: str = STOPPED) -> None:
        """Handle no further event. `ask` raises this error from now on."""
        self.stopped, self._refusal = True, (error, reason)
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        """Most events leave the next deadline where it was; then the timer stays."""
        deadline = None if self.stopped else self.machine.next_deadline()
        if self._timer is not None:
            if self._timer_at == deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer, self._timer_at = self._loop.call_at(deadline, self._tick), deadline

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())
