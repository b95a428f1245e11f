"""A number of slots that tenants take in turns: a tenant with many waiting calls delays another by one of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class FairSlots:
    """A slot is free, or somebody has it. Nobody waits while one is free."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # the tenant whose turn is next first

    async def acquire(self, tenant: Hashable) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # cancelled in the same iteration of the loop that gave it the slot
                self.release()
            raise

    def release(self) -> None:
        """Give the slot to the next tenant, which then goes behind the others."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.cancelled():  # else its task has not run since
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, tenant: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]
