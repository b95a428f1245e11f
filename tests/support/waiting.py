"""Waits for a condition that causes no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 30.0) -> None:
    """Poll `condition` until it is true, for at most `seconds`. `what` describes the condition or the fault."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{seconds:g} s: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.002)
