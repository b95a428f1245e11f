"""The last requests of this router, for ListRequests and GetTrace. Works without any exporter.

The ring keeps one `EndedChoice` for each choice that has ended. Its spans are made only when a client asks for them, or
for an export.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from router.serving.ended_choice import EndedChoice
from tandem_client.stubs import cluster_pb2

CAPACITY = 512  # ended requests that a router keeps for `tandem trace`; beyond: the oldest is dropped
# Limit: choices of one trace in `tandem trace`: any client may name the trace of another; beyond: the newest are shown
MAX_TRACED = 32


@dataclass(slots=True, eq=False)
class RingEntry:
    number: int
    ended: EndedChoice
    summary: cluster_pb2.RequestSummary | None = None  # made for the first client that asks, and copied for each


class RequestRing:
    """The newest `CAPACITY` ended choices, numbered from 1."""

    def __init__(self) -> None:
        self._ended: deque[RingEntry] = deque(maxlen=CAPACITY)
        self._num_added = 0

    def add(self, ended: EndedChoice) -> None:
        self._num_added += 1
        self._ended.append(RingEntry(self._num_added, ended))

    def newest(self, limit: int, after: int) -> Iterator[RingEntry]:
        """Choices with a number above `after`, newest first."""
        num_new = max(0, self._num_added - after)
        return islice(reversed(self._ended), min(limit, num_new))

    def find(self, name: str) -> list[RingEntry]:
        """The choices of the newest call with this request id, else of this trace id; by number of the choice. At most
        MAX_TRACED."""
        found = [entry for entry in self._ended if entry.ended.request_id == name]
        if found:  # a client may use one request id for several calls
            newest = found[-1].ended.arrived_at
            found = [entry for entry in found if entry.ended.arrived_at == newest]
        else:
            found = [entry for entry in self._ended if entry.ended.trace.trace_id_hex == name.lower()]
        return sorted(found[-MAX_TRACED:], key=lambda entry: (entry.ended.arrived_at, entry.ended.choice))
