"""The parameters of a simulated worker: pool, limits, costs and faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.config import SchedulerConfig, TransferConfig, WorkerConfig
from core.cost.step_cost import PRIOR, StepCost
from core.handoff import Location
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from simulator.shells.cost_model import LinkCost
from simulator.virtual.faults import DiskFaults, EngineFaults


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    worker_id: str
    role: ServiceRole
    num_blocks: int
    layout: KVLayout
    scheduler: SchedulerConfig
    transfer: TransferConfig
    step_cost: StepCost
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    has_vllm: bool = False
    # Costs
    known_cost: StepCost = PRIOR  # the worker's own estimate at its start
    step_noise: float = 0.0  # standard deviation of the logarithm of a step's time
    link: LinkCost | None = None  # of reads; None: `ReadFaults.seconds_per_block`
    disk_slots: int = 0  # of the tier below the pool; 0: none
    location: Location = field(default_factory=Location)
    probe_bytes: int = 0  # 0: no path is measured
    # Faults
    draft_accuracy: float = 0.0  # probability that a proposed token is right; 0: nothing is proposed
    rounding: int = 0  # workers of different numbers sample different tokens at some positions
    has_content: bool = False  # each slot of the KV is a number, so a wrong block gives a wrong token
    step_failure: float = 0.0  # probability
    memory_failure: float = 0.0  # probability that a step has no memory for one of its sequences
    disk: DiskFaults = field(default_factory=DiskFaults)
    engine: EngineFaults = field(default_factory=EngineFaults)
