"""How a test waits for what gives no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 8.0) -> None:
    """Machines have no bell for a test to wait on, so it looks often. `what` is wanted, or says what is wrong."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{seconds:g} s: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.002)
