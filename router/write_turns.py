"""The order in which the writers of open calls wake, so that a busy router joins tokens instead of falling behind.

A message to a client costs the event loop as much as all the tokens of a worker's step. If each step woke every call,
the loop would read one step and then write hundreds of messages, and the steps that wait to be read would pile up in
the connection. So calls with new tokens wait for a turn, and each round of the event loop wakes at most
`CALLS_PER_ROUND` of them. New steps are read between the rounds: their tokens join the tokens that wait already. While
the loop keeps up, the turn of every call comes before the next step, and each token has a message of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque

CALLS_PER_ROUND = 16
TIMER_RESOLUTION_S = 0.001  # a timer of uvloop may ring this much early


class WriteTurns:
    """The calls of one router that wait for their turn. Use it on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()

    def append(self, turn: Turn) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._wake_some)
        self._waiting.append(turn)

    def _wake_some(self) -> None:
        for _ in range(min(CALLS_PER_ROUND, len(self._waiting))):
            self._waiting.popleft().take()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._wake_some)


class Turn:
    """Wakes the writer of one call."""

    def __init__(self, turns: WriteTurns) -> None:
        self._turns = turns
        self._is_waiting = False  # in `_turns`
        self._taken = asyncio.Event()

    def ask(self) -> None:
        """Wake the writer when its turn comes."""
        if not self._is_waiting:
            self._is_waiting = True
            self._turns.append(self)

    def take(self) -> None:
        """Wake the writer now."""
        self._is_waiting = False
        self._taken.set()

    async def wait(self, until: float = 0.0) -> None:
        """Wait until the writer is woken, or until the loop's time is `until`, if that is not 0."""
        if until:
            timer = asyncio.get_running_loop().call_at(until + TIMER_RESOLUTION_S, self._taken.set)
            await self._taken.wait()
            timer.cancel()
        else:
            await self._taken.wait()
        self._taken.clear()
