"""The forecasts of the time in which no pool had to grow: a smaller size must hold the busiest of them."""

from __future__ import annotations

from collections import deque


class RecentForecasts:
    def __init__(self) -> None:
        self._since: float | None = None
        self._rates: deque[tuple[float, float]] = deque()  # (time, rate); the rates fall

    def clear(self) -> None:
        self._since = None
        self._rates.clear()

    def busiest(self, rate: float, seconds: float, now: float) -> float | None:
        """Add a rate. Return the highest of the newest `seconds`; None until there are so many."""
        self._since = now if self._since is None else self._since
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        while self._rates[0][0] < now - seconds:
            self._rates.popleft()
        return self._rates[0][1] if now - self._since >= seconds else None
