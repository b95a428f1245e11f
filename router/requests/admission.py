"""Admission: with `admission = "shed"`, a request whose first token is predicted too late is refused at once.

The prediction is the time since arrival, plus the wait in the router's queue, plus `Candidate.first_token_s`. The limit
is the wanted time to the first token or the deadline, whichever comes first. Three kinds of requests pass:

- those of which the client has tokens: a refusal would take them back;
- those for a worker that has measured no step: its prediction is a guess, and refusals would keep it a guess;
- with `admission = "queue"`, all. The deadline ends those that are late.
"""

from __future__ import annotations

from core.config import RouterConfig
from core.errors import QueueFull

MIN_RETRY_AFTER_S = 0.1


class QueueWait:
    """Predicts the wait in a queue for room: the newest intervals between dispatches of requests that had waited."""

    def __init__(self) -> None:
        self._interval_s = 0.0  # 0 = unknown
        self._last_at: float | None = None  # of the last dispatches since the queue was empty
        self._num_at_once = 0  # dispatches at that moment

    def note_dispatch(self, now: float) -> None:
        """A request that had waited for room is dispatched. One event may give room to several."""
        if self._last_at is not None and now > self._last_at:
            interval_s = (now - self._last_at) / self._num_at_once
            self._interval_s = (
                self._interval_s + (interval_s - self._interval_s) / 8 if self._interval_s else interval_s
            )
        self._num_at_once = self._num_at_once + 1 if now == self._last_at else 1
        self._last_at = now

    def note_empty(self) -> None:
        self._last_at = None

    def seconds(self, num_ahead: int) -> float:
        return (num_ahead + 1) * self._interval_s


def refusal(config: RouterConfig, predicted_s: float, deadline_s: float) -> QueueFull | None:
    """The error for a request with this prediction. Both times count from its arrival."""
    slo_s = config.slo_ttft_ms / 1e3
    limit_s = min(slo_s, deadline_s)
    if config.admission != "shed" or predicted_s <= limit_s:
        return None
    limit = f"slo_ttft_ms is {config.slo_ttft_ms:g}" if slo_s <= deadline_s else f"its deadline is {deadline_s:.3f} s"
    return QueueFull(
        f"the first token is predicted {predicted_s:.3f} s after the arrival of the request, and {limit}",
        max(MIN_RETRY_AFTER_S, predicted_s - limit_s),
    )
