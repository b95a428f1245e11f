"""The result of a replay: a record for each request, and the figures that follow. Every time is in seconds.

TTFT         arrival to first token
TPOT         (last - first token) / (tokens - 1), of requests with at least two tokens
ITL          every gap between tokens, of all requests
TBT10        mean of the worst tenth of a request's gaps
attainment   share of requests with TTFT and TPOT within the limits; refusals, errors and time-outs are misses
goodput      requests within the limits, per second
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

PERCENTS = (50, 90, 99)
ACCURATE_SHARE = 0.2  # a prediction within this share of the time is accurate
WANTED_ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, as its client sees it."""

    request_id: str
    arrived_at: float  # after the first arrival
    num_prompt_tokens: int
    num_output_tokens: int  # delivered
    ttft_s: float | None  # None: without a token
    tpot_s: float | None = None  # None: with fewer than two tokens
    tbt10_s: float | None = None  # likewise
    cached_tokens: int = 0
    path: str = ""  # disaggregated | local | recomputed; empty for a failed request
    prefill_worker: str | None = None
    decode_worker: str = ""
    predicted_ttft_s: float | None = None  # at the dispatch, counted from the arrival
    attempts: int = 0
    error: str = ""  # empty: finished

    def within(self, slo_ttft_s: float, slo_tpot_s: float) -> bool:
        if self.error or self.ttft_s is None or self.ttft_s > slo_ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= slo_tpot_s


class GapHistogram:
    """Gaps between tokens, in buckets 1 % wide: a replay has millions of gaps."""

    WIDTH = math.log(1.01)
    LEAST_S = 1e-6

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add_all(self, gaps_s: Iterable[float]) -> None:
        least, width, log, counts = self.LEAST_S, self.WIDTH, math.log, self.counts
        for gap_s in gaps_s:
            bucket = int(log(gap_s / least) / width) if gap_s > least else 0
            counts[bucket] = counts.get(bucket, 0) + 1

    def percentile(self, percent: float) -> float:
        """Nearest rank, within 0.5 %; 0 without gaps."""
        rank = int(sum(self.counts.values()) * percent / 100)
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank < 0:
                return self.LEAST_S * math.exp((bucket + 0.5) * self.WIDTH)
        return 0.0 if not self.counts else self.LEAST_S * math.exp((max(self.counts) + 0.5) * self.WIDTH)


@dataclass(frozen=True)
class ReplayResult:
    requests: tuple[RequestRecord, ...]  # by arrival
    slo_ttft_s: float
    slo_tpot_s: float
    arrivals_s: float  # virtual, from the first arrival to the last
    duration_s: float  # virtual, from the first arrival to the last token
    infinite_hit_ratio: float  # of one cache without a limit
    itl_s: dict[int, float]  # percent -> seconds
    prefill_queue_s: tuple[float, ...]  # rising, in the queue of a prefill worker
    router_queue_s: tuple[float, ...]  # likewise
    transfer_exposed_s: tuple[float, ...]  # likewise
    prefill_busy: tuple[float, ...]  # share of the duration, by worker
    decode_busy: tuple[float, ...]
    prefill_used: tuple[float, ...]  # mean share of blocks with a holder or a reader, by worker
    decode_used: tuple[float, ...]
    requests_by_router: tuple[int, ...]
    num_events: int

    # ---- counts

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def num_failed(self) -> int:
        return sum(bool(record.error) for record in self.requests)

    @property
    def num_retried(self) -> int:
        return sum(record.attempts > 1 for record in self.requests if not record.error)

    # ---- times: rising, over the requests that finished

    @cached_property
    def ttft_s(self) -> tuple[float, ...]:
        return rising(record.ttft_s for record in self._finished)

    @cached_property
    def tpot_s(self) -> tuple[float, ...]:
        return rising(record.tpot_s for record in self._finished)

    @cached_property
    def tbt10_s(self) -> tuple[float, ...]:
        return rising(record.tbt10_s for record in self._finished)

    @property
    def _finished(self) -> list[RequestRecord]:
        return [record for record in self.requests if not record.error]

    # ---- goals

    @property
    def rate(self) -> float:
        """Requests/s that arrived; 0 for a single request."""
        return self.num_requests / self.arrivals_s if self.arrivals_s > 0 else 0.0

    @cached_property
    def num_within(self) -> int:
        return sum(record.within(self.slo_ttft_s, self.slo_tpot_s) for record in self.requests)

    @property
    def attainment(self) -> float:
        return self.num_within / self.num_requests

    @property
    def goodput(self) -> float:
        """Requests/s within the limits, over the duration."""
        return self.num_within / self.duration_s if self.duration_s > 0 else 0.0

    # ---- cache

    @cached_property
    def hit_ratio(self) -> float:
        """Cached prompt tokens / prompt tokens, of the requests that finished."""
        finished = self._finished
        return sum(r.cached_tokens for r in finished) / max(1, sum(r.num_prompt_tokens for r in finished))

    @property
    def hit_share(self) -> float:
        """Of the hit ratio of a cache without a limit."""
        return self.hit_ratio / self.infinite_hit_ratio if self.infinite_hit_ratio else 0.0

    # ---- predictions

    @cached_property
    def prediction_errors(self) -> tuple[float, ...]:
        """|predicted - actual TTFT| / actual, rising, of requests that finished at the first attempt."""
        return rising(
            abs(record.predicted_ttft_s - record.ttft_s) / record.ttft_s
            for record in self._finished
            if record.predicted_ttft_s is not None and record.ttft_s and record.attempts == 1
        )

    @property
    def accurate_share(self) -> float:
        """Share of predictions within 20 % of the time."""
        errors = self.prediction_errors
        return sum(error <= ACCURATE_SHARE for error in errors) / len(errors) if errors else 0.0

    def to_dict(self, *, with_requests: bool = False) -> dict[str, object]:
        """For JSON: the figures, and the records of all requests on demand."""
        errors = self.prediction_errors
        figures: dict[str, object] = {
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "num_retried": self.num_retried,
            "rate": self.rate,
            "duration_s": self.duration_s,
            "ttft_s": percentiles(self.ttft_s),
            "tpot_s": percentiles(self.tpot_s),
            "itl_s": {f"p{percent}": seconds for percent, seconds in self.itl_s.items()},
            "tbt10_s": percentiles(self.tbt10_s),
            "slo_ttft_s": self.slo_ttft_s,
            "slo_tpot_s": self.slo_tpot_s,
            "attainment": self.attainment,
            "goodput": self.goodput,
            "hit_ratio": self.hit_ratio,
            "infinite_hit_ratio": self.infinite_hit_ratio,
            "hit_share": self.hit_share,
            "prefill_queue_s": percentiles(self.prefill_queue_s),
            "router_queue_s": percentiles(self.router_queue_s),
            "transfer_exposed_s": percentiles(self.transfer_exposed_s),
            "paths": {path: sum(r.path == path for r in self._finished) for path in _paths(self._finished)},
            "prefill_busy": _spread(self.prefill_busy),
            "decode_busy": _spread(self.decode_busy),
            "prefill_used": _spread(self.prefill_used),
            "decode_used": _spread(self.decode_used),
            "ttft_prediction": {"median_error": percentile(errors, 50), "within_20_percent": self.accurate_share},
            "num_events": self.num_events,
        }
        if with_requests:
            figures["requests"] = [asdict(record) for record in self.requests]
        return figures


def percentile(rising: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 without values."""
    return rising[min(len(rising) - 1, int(len(rising) * percent / 100))] if rising else 0.0


def percentiles(rising: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(rising, percent) for percent in PERCENTS}


def worst_tenth_mean(gaps: Sequence[float]) -> float:
    """TBT10: the mean of the longest tenth of the gaps, at least one. Raises `ValueError` without gaps."""
    if not gaps:
        raise ValueError("there is no gap")
    num_worst = -(-len(gaps) // 10)
    return statistics.fmean(sorted(gaps)[-num_worst:])


def goodput90(points: Iterable[tuple[float, float]]) -> float:
    """The highest rate with an attainment of at least 0.9, from (rate, attainment) points of a sweep.

    The attainment is interpolated between two rates. It counts up to the first rate where it falls below 0.9: a higher
    rate that reaches 0.9 again is chance. 0 if the lowest rate misses; the highest rate if none does.
    """
    before: tuple[float, float] | None = None
    for rate, attainment in sorted(points):
        if attainment < WANTED_ATTAINMENT:
            if before is None:
                return 0.0
            last_rate, last = before
            return last_rate + (rate - last_rate) * (last - WANTED_ATTAINMENT) / (last - attainment)
        before = rate, attainment
    return 0.0 if before is None else before[0]


def rising(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted(value for value in values if value is not None))


def _paths(records: Sequence[RequestRecord]) -> list[str]:
    return sorted({record.path for record in records})


def _spread(shares: Sequence[float]) -> dict[str, float]:
    if not shares:
        return {"mean": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": statistics.fmean(shares), "min": min(shares), "max": max(shares)}
