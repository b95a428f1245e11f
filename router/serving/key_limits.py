"""The limits of each API key at one router: open requests, and requests in any 60 seconds.

Law: a key never has more than `max_streams` open requests, and no 60 seconds contain more than `requests_per_minute`
admitted requests. A refused request counts for neither.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.config import ApiKeyConfig
from core.errors import InvalidRequest, KeyLimitReached

WINDOW_S = 60.0
STREAM_RETRY_S = 1.0  # nobody knows when a stream ends


@dataclass(slots=True)
class _Use:
    num_open: int = 0
    admitted_at: deque[float] = field(default_factory=deque)  # in the last WINDOW_S, if the key has that limit


class KeyLimits:
    def __init__(self) -> None:
        self._use: dict[str, _Use] = {}  # by the name of the key

    def admit(self, key: ApiKeyConfig, now: float, num_together: int = 1) -> None:
        """Count a request as open until `release`. Raises `KeyLimitReached`, with a hint when to retry.

        `num_together`: requests that are only of use together. Raises `InvalidRequest` if the limits never allow them.
        """
        for name, limit in (("max_streams", key.max_streams), ("requests_per_minute", key.requests_per_minute)):
            if 0 < limit < num_together:
                raise InvalidRequest(
                    "prompt", f"has {num_together} prompts, API key {key.name!r} allows {limit} ({name})"
                )
        use = self._use.setdefault(key.name, _Use())
        while use.admitted_at and use.admitted_at[0] <= now - WINDOW_S:
            use.admitted_at.popleft()
        if key.max_streams and use.num_open >= key.max_streams:
            raise KeyLimitReached(
                f"API key {key.name!r} has {use.num_open} open requests, its limit (max_streams)", STREAM_RETRY_S
            )
        if key.requests_per_minute and len(use.admitted_at) >= key.requests_per_minute:
            raise KeyLimitReached(
                f"API key {key.name!r} has made {len(use.admitted_at)} requests in the last minute, "
                "its limit (requests_per_minute)",
                use.admitted_at[0] + WINDOW_S - now,
            )
        use.num_open += 1
        if key.requests_per_minute:
            use.admitted_at.append(now)

    def release(self, key: ApiKeyConfig) -> None:
        use = self._use[key.name]
        assert use.num_open > 0, f"key {key.name!r} releases more requests than it had"
        use.num_open -= 1

    def num_open(self, name: str) -> int:
        return self._use[name].num_open if name in self._use else 0
