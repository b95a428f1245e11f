"""The last requests of this router, for ListRequests and GetTrace. Works without any exporter.

A choice that has ended becomes one `EndedChoice`: references to what the router knows anyway, and no tokens. Its spans
are made only when a client asks for them, or for an export.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from core.lifecycle import Stage
from core.request import SamplingParams
from router.requests.events import Attempt, Outcome
from runtime.tracing.trace_context import TraceContext

CAPACITY = 512


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """One choice of a call, or a refused call. Times are on the monotonic clock, but for `arrived_unix_s`."""

    trace: TraceContext
    request_id: str  # of the client, equal for all choices of a call
    choice: int
    operation: str  # "chat" or "text_completion"
    model: str
    arrived_at: float
    ended_at: float  # after the last message
    arrived_unix_s: float
    tenant: str = ""
    sampling: SamplingParams | None = None  # None: refused before it was read
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stages: tuple[tuple[Stage, float, float], ...] = ()  # in the router: stage, start, end; oldest first
    generated_at: float | None = None  # when the generation ended
    outcome: Outcome | None = None  # None after an error
    error_code: str = ""
    error: str = ""
    attempts: tuple[Attempt, ...] = ()

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def first_token_s(self) -> float:
        """From the arrival; 0 without a token."""
        started = next((start for stage, start, _ in self.stages if stage is Stage.DECODE), self.arrived_at)
        return started - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return 0.0
        decode_s = sum(end - start for stage, start, end in self.stages if stage is Stage.DECODE)
        return decode_s / (self.num_output_tokens - 1)

    @property
    def end(self) -> str:
        return self.error_code if self.outcome is None else self.outcome.finish_reason.value


class RequestRing:
    """The newest `CAPACITY` ended choices, numbered from 1."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, EndedChoice]] = deque(maxlen=CAPACITY)
        self._num_added = 0

    def add(self, ended: EndedChoice) -> None:
        self._num_added += 1
        self._ended.append((self._num_added, ended))

    def newest(self, limit: int, after: int) -> Iterator[tuple[int, EndedChoice]]:
        """Choices with a number above `after`, newest first."""
        num_new = max(0, self._num_added - after)
        return islice(reversed(self._ended), min(limit, num_new))

    def find(self, name: str) -> list[tuple[int, EndedChoice]]:
        """The choices of the newest call with this request id, else of this trace id; by number of the choice."""
        found = [entry for entry in self._ended if entry[1].request_id == name]
        if found:  # a client may use one request id for several calls
            newest = found[-1][1].arrived_at
            found = [entry for entry in found if entry[1].arrived_at == newest]
        else:
            found = [entry for entry in self._ended if entry[1].trace.trace_id_hex == name.lower()]
        return sorted(found, key=lambda entry: (entry[1].arrived_at, entry[1].choice))
