"""The services that a supervisor keeps alive, as one revision of the config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from core.config import ClusterConfig, LiveConfig, PlannerConfig
from core.lifecycle import ServiceRole
from core.service import PoolSizes
from fleet.claims import Claims, GpuUse
from fleet.events import FleetRules
from fleet.service_host import ServiceFactory

# The address that routers listen on, from the machine's address as in `Placement`. Pickled by name.
RouterHost = Callable[[str], str]


# A spec from another config, as in `FleetControl.roll`. Raises `InvalidRequest`. Pickled by name.
Reread = Callable[[str], "FleetSpec"]

# The spec after a change of live options, as in `FleetControl.change_config`, and what has changed: nothing, if empty.
# Raises `InvalidRequest`. Pickled by name.
Amend = Callable[[str, str], tuple["FleetSpec", tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Another Python than that of `tandem serve`, for the processes of workers."""

    python: str
    variables: Mapping[str, str]  # of the environment


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The services that a supervisor keeps alive."""

    config: ClusterConfig
    router: ServiceFactory
    prefill: ServiceFactory
    decode: ServiceFactory
    router_host: RouterHost
    router_port: int  # 0 = any free port
    drain_timeout_s: float  # of a worker
    router_drain_timeout_s: float
    gpu_use: GpuUse = GpuUse.NEVER  # of the workers
    gpus_per_worker: int = 1  # whole GPUs of a worker with tensor parallelism
    interpreter: Interpreter | None = None  # of the workers; None = as `tandem serve`
    reread: Reread | None = None  # None: the config cannot change
    amend: Amend | None = None
    live: LiveConfig = field(default_factory=LiveConfig)  # for services, as soon as their factory has built them
    text: str = "{}"  # the config as JSON, as in `FleetConfig`
    built_text: str = "{}"  # likewise, of the last start or roll: services are built with it, and then take `live`
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    local_prefill: bool = True  # decode workers compute prompts beside prefill workers
    role_option: str = ""  # the option that keeps workers from changing their roles
    # A later supervisor with the same `kinship` adopts services that outlive theirs; empty: they end with it.
    kinship: str = ""

    def followed_by(self, new: FleetSpec) -> FleetSpec:
        """`new` in the same fleet."""
        return replace(new, gpu_use=self.gpu_use, kinship=self.kinship)

    def factory(self, role: ServiceRole) -> ServiceFactory:
        factories = {
            ServiceRole.ROUTER: self.router,
            ServiceRole.PREFILL: self.prefill,
            ServiceRole.DECODE: self.decode,
        }
        return factories[role]

    @property
    def sizes(self) -> PoolSizes:
        """At the start."""
        config = self.config
        return {
            ServiceRole.PREFILL: config.num_prefill,
            ServiceRole.DECODE: config.num_decode,
            ServiceRole.ROUTER: config.num_routers,
        }

    @property
    def claims(self) -> Claims:
        return Claims(self.config, self.gpu_use, self.gpus_per_worker)

    @property
    def rules(self) -> FleetRules:
        return FleetRules(self.claims, self.drain_timeout_s, self.router_drain_timeout_s, self.role_option)
