"""Options of the planner, which sizes the two pools of workers (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.live import live
from core.config.requirements import require, require_finite_floats, require_positive


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    enabled: bool = live(False)  # size the pools by the traffic; else they keep the sizes of `tandem scale`
    min_prefill: int = live(0)  # prefill workers, at least; decode workers compute prompts themselves
    max_prefill: int = live(4)  # ... at most
    min_decode: int = live(1)  # decode workers, at least; 0 = none after idle_s without a request
    max_decode: int = live(4)  # ... at most
    max_workers: int = live(0)  # both pools together; 0 = no further limit
    prefill_price: float = live(1.0)  # of a prefill worker, in any unit: the cheapest pools win
    decode_price: float = live(1.0)  # of a decode worker
    start_s: float = live(60.0)  # a start takes so long, until the planner has measured one; requests wait for it
    idle_s: float = live(600.0)  # without a request for so long, pools with a minimum of 0 become empty

    def __post_init__(self) -> None:
        require_positive(self, "prefill_price", "decode_price", "start_s", "idle_s")
        require_finite_floats(self)
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            require(least >= 0, f"min_{pool} must be 0 or more, is {least}")
            require(most >= max(1, least), f"max_{pool} must be at least {max(1, least)}, is {most}")
        require(self.max_workers >= 0, f"max_workers must be 0 (no further limit) or more, is {self.max_workers}")
        require(
            not self.max_workers or self.max_workers >= self.min_prefill + max(1, self.min_decode),
            f"max_workers must hold min_prefill and a decode worker, is {self.max_workers}",
        )
