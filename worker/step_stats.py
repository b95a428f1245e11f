"""Counts of the steps of a worker, for its report: durations, floating-point operations, and bytes of memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from core.cost.model_work import ModelSizes, Peak
from core.cost.step_cost import StepWork
from core.scheduling.worker_load import STEP_BOUNDS_S

RECENT_S = 1.0  # of steps that the shares of the peak are means of; older steps count less and less


@dataclass(slots=True)
class StepStats:
    """Totals count from the start. Without `sizes`, operations and bytes stay 0."""

    sizes: ModelSizes | None = None
    peak: Peak = Peak()  # noqa: RUF009 - it is frozen
    num_sequences: int = 0  # in the newest step
    num_tokens: int = 0  # in the newest step
    seconds: float = 0.0
    decode_seconds: float = 0.0  # of steps with a decode
    flop: float = 0.0
    memory_bytes: float = 0.0
    _decode_steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    _recent: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds, FLOP, bytes

    def record(self, work: StepWork, seconds: float) -> None:
        self.seconds += seconds
        if work.num_decodes:
            self._decode_steps[bisect_left(STEP_BOUNDS_S, seconds)] += 1
            self.decode_seconds += seconds
        if self.sizes is not None:
            flop, memory_bytes = self.sizes.flop(work), self.sizes.memory_bytes(work)
            self.flop += flop
            self.memory_bytes += memory_bytes
            keep = max(0.0, 1.0 - seconds / RECENT_S)
            spent, done, moved = self._recent
            self._recent = spent * keep + seconds, done * keep + flop, moved * keep + memory_bytes

    @property
    def decode_steps(self) -> tuple[int, ...]:
        """By STEP_BOUNDS_S, without zeros at the end."""
        counts = self._decode_steps
        num_kept = max((place + 1 for place, count in enumerate(counts) if count), default=0)
        return tuple(counts[:num_kept])

    @property
    def flop_use(self) -> float:
        """Share of the peak; 0 = not known."""
        spent, done, _ = self._recent
        return done / spent / self.peak.flop_per_s if spent and self.peak.flop_per_s else 0.0

    @property
    def bandwidth_use(self) -> float:
        """Share of the peak; 0 = not known."""
        spent, _, moved = self._recent
        return moved / spent / self.peak.bytes_per_s if spent and self.peak.bytes_per_s else 0.0
