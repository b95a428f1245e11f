"""Options of the planner, which sizes the two pools of workers (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.options import check_options, live, require


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    enabled: bool = live(False)  # size the pools by the traffic; else they keep the sizes of `tandem scale`
    min_prefill: int = live(0)  # prefill workers, at least; decode workers compute prompts themselves
    max_prefill: int = live(4, least=1)  # ... at most
    min_decode: int = live(1)  # decode workers, at least; 0 = none after idle_s without a request
    max_decode: int = live(4, least=1)  # ... at most
    max_workers: int = live(0)  # both pools together; 0 = no further limit
    prefill_price: float = live(1.0, positive=True)  # of a prefill worker, in any unit: the cheapest pools win
    decode_price: float = live(1.0, positive=True)  # of a decode worker
    # A start takes so long, until the planner has measured one; requests wait for it
    start_s: float = live(60.0, positive=True)
    idle_s: float = live(600.0, positive=True)  # without a request for so long, pools with a minimum of 0 become empty

    def __post_init__(self) -> None:
        check_options(self)
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            require(most >= least, f"max_{pool} must be at least {least} (min_{pool}), is {most}")
        require(
            not self.max_workers or self.max_workers >= self.min_prefill + max(1, self.min_decode),
            f"max_workers must hold min_prefill and a decode worker, is {self.max_workers}",
        )
