"""Whether a worker may read prefixes from a peer now.

    before the first read, or after a failure    one read is a trial: no other begins before its answer, or for 10 s
    a read has brought tokens                    any number of reads
    a read has failed                            none for 10 s, doubled with each failure in a row, up to 10 minutes

So a peer that gives nothing, or a path that is slower than its price, costs one read each time, and ever more rarely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILED_SOURCE_S, MAX_FAILED_SOURCE_S = 10.0, 600.0


@dataclass(slots=True)
class SourceTrial:
    """Of a pair of a reader and a source."""

    is_trusted: bool = False
    pause_s: float = FAILED_SOURCE_S  # after the next failure
    failed_at: float = -math.inf
    avoided_until: float = 0.0

    def begin(self, now: float) -> None:
        if not self.is_trusted:
            self.avoided_until = max(self.avoided_until, now + FAILED_SOURCE_S)

    def end(self, num_tokens: int | None, began_at: float, now: float) -> None:
        """A read has brought so many tokens; None: the reader did not begin it.

        Reads that overlap count as one failure.
        """
        if num_tokens:
            self.is_trusted, self.pause_s, self.avoided_until = True, FAILED_SOURCE_S, 0.0
        elif began_at < self.failed_at:
            return
        elif num_tokens is None:
            self.avoided_until = 0.0
        else:
            self.is_trusted, self.failed_at, self.avoided_until = False, now, now + self.pause_s
            self.pause_s = min(2 * self.pause_s, MAX_FAILED_SOURCE_S)
