"""A number of slots that clients take in turns: one with many waiting calls delays another by one of them."""

from __future__ import annotations

import asyncio
from collections import deque

from runtime.owner_ledger import Owner

Turns = deque[asyncio.Future[None]]


class FairSlots:
    """A slot is free, or somebody has it. Nobody waits while one is free.

    Addresses take turns, and in the turn of an address its keys do: many keys give an address no more slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: dict[str, dict[str, Turns]] = {}  # by address and key, those whose turn is next first

    async def acquire(self, owner: Owner) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        host, key = owner
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, {}).setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(owner, turn)
            else:  # cancelled in the same iteration of the loop that gave it the slot
                self.release()
            raise

    def release(self) -> None:
        """Give the slot to the next key of the next address. Both then go behind the others."""
        while self._waiting:
            host = next(iter(self._waiting))
            keys = self._waiting.pop(host)
            key = next(iter(keys))
            turns = keys.pop(key)
            turn = turns.popleft()
            if turns:
                keys[key] = turns
            if keys:
                self._waiting[host] = keys
            if not turn.cancelled():  # else its task has not run since
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, owner: Owner, turn: asyncio.Future[None]) -> None:
        host, key = owner
        keys = self._waiting.get(host, {})
        if turn not in keys.get(key, ()):
            return
        keys[key].remove(turn)
        if not keys[key]:
            del keys[key]
        if not keys:
            del self._waiting[host]
