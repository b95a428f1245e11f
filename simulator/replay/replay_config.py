"""The setting of a replay: workers, routers, step and transfer times, arrivals, and the limits of the goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from core.config import RouterConfig, SchedulerConfig, WorkerConfig
from core.cost.step_cost import StepCost
from core.kv_layout import KVLayout
from router.routing.question import Policy
from simulator.shells.cost_model import H100_8B, RDMA_400G, LinkCost, layout_8b


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Set `load` or `rate` to scale the arrivals; with neither, requests arrive at the times of the workload.

    Raises `ValueError` naming the field.
    """

    num_routers: int = 1
    num_prefill: int = 4  # 0: the decode workers compute all prompts
    num_decode: int = 4
    prefill_pool_tokens: int = 1_000_000  # of each worker
    decode_pool_tokens: int = 400_000  # 52 GB of 128 KiB each
    layout: KVLayout = field(default_factory=partial(layout_8b, 64))
    load: float | None = None  # share of the time in which the prefill workers would be busy without a cache
    rate: float | None = None  # requests/s
    poisson: bool = False  # random gaps between requests, at the same mean rate, in place of those of the workload
    sticky: bool = False  # a router for each conversation, not for each request
    seed: int = 0
    check_every_s: float = 0.0  # virtual seconds between two checks of every machine; 0 = at the end only
    prefill_cost: StepCost = H100_8B
    decode_cost: StepCost = H100_8B
    step_noise: float = 0.0  # standard deviation of the logarithm of a step's time
    link: LinkCost = RDMA_400G
    message_delay_s: float = 0.0005  # of a message between router and worker; 0.5 to 2.5 times as long
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    new_policy: Callable[[], Policy] | None = None  # called once for each router; None = the production policy
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=partial(RouterConfig, max_in_flight_per_worker=1024))
    scheduler: SchedulerConfig = field(
        default_factory=partial(SchedulerConfig, max_batched_tokens=8192, max_running=256, max_waiting=4096)
    )

    def __post_init__(self) -> None:
        if self.load is not None and self.rate is not None:
            raise ValueError("load and rate must not be set together")
        for name in ("num_routers", "num_decode", "slo_ttft_s", "slo_tpot_s", "load", "rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, is {value:g}")
        for name in ("num_prefill", "step_noise", "check_every_s", "message_delay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name):g}")
        for name in ("prefill_pool_tokens", "decode_pool_tokens"):
            if getattr(self, name) < self.layout.block_size:
                least = self.layout.block_size
                raise ValueError(f"{name} must be at least one block, {least} tokens, is {getattr(self, name)}")
