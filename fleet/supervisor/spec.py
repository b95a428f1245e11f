"""The services that a supervisor keeps alive, as one revision of the config says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from core.config import ClusterConfig, ConfigText, LiveConfig, PlannerConfig, Taken, TandemConfig, changes, steps_fit
from core.config.changes import STEP_SIZES
from core.errors import ConfigError, InvalidRequest
from core.lifecycle import ServiceRole
from core.service import PoolSizes
from fleet.host.service_host import ServiceFactory
from fleet.law.claims import Claims, GpuUse
from fleet.law.events import FleetRules

MESSAGE_MARGIN = 4096  # of the largest message: what is not the config

# The address that routers listen on, from the machine's address as in `Placement`. Pickled by name.
RouterHost = Callable[[str], str]


# The spec of a text, whose own text is complete. Raises `InvalidRequest`. Pickled by name.
MakeSpec = Callable[[ConfigText], "FleetSpec"]

# Whether services of this machine can start with a config. Raises `ConfigError`. Pickled by name.
CheckConfig = Callable[[TandemConfig], None]


def _take_all(_: TandemConfig) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Another Python than that of `tandem serve`, for the processes of workers."""

    python: str
    variables: Mapping[str, str]  # of the environment


@dataclass(frozen=True, slots=True)
class NextSpec:
    """What follows from an order of an operator."""

    spec: FleetSpec
    changes: tuple[str, ...]  # one line for each option with another value, for the operator who gave the order
    restarts: bool  # every service starts again; else it takes the changes while it serves
    names: tuple[str, ...] = ()  # of these options, without values: events need no token


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
    make: MakeSpec | None = None  # None: the config cannot change
    check: CheckConfig = _take_all  # before services start again
    text: ConfigText = field(default_factory=ConfigText)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    local_prefill: bool = True  # decode workers compute prompts beside prefill workers
    role_option: str = ""  # the option that keeps workers from changing their roles
    # A later supervisor with the same `kinship` adopts services that outlive theirs; empty: they end with it.
    kinship: str = ""

    @property
    def live(self) -> LiveConfig:
        """For services, as soon as their factory has built them."""
        return LiveConfig.of(self.text.config)

    def of(self, text: ConfigText) -> FleetSpec:
        """The spec of another text in the same fleet. Raises `InvalidRequest`."""
        if self.make is None:
            raise InvalidRequest("config", "this fleet cannot change its config")
        return replace(self.make(text), gpu_use=self.gpu_use, kinship=self.kinship)

    def after(self, config: str, options: str, restart: bool) -> NextSpec:
        """The spec after an order of an operator, as in `FleetControl.apply`. Raises `InvalidRequest`."""
        if not (config or options):
            return NextSpec(self._checked() if restart else self, (), restart)
        old = self.text
        spec = self.of(old.merged(config, options))
        found = changes(old.config, spec.text.config)
        if fixed := [change.name for change in found if change.taken is Taken.NEVER]:
            raise InvalidRequest("config", f"start `tandem serve` again to change {', '.join(fixed)}")
        sizes = [change for change in found if change.taken is Taken.SIZE]
        if sizes and options:
            raise InvalidRequest("options", f"use `tandem scale` in place of {sizes[0].name}")
        _check_size(old, spec.text)
        shown = [change for change in found if change not in sizes]
        lines, names = tuple(map(str, shown)), tuple(change.name for change in shown)
        fits = steps_fit(old.built, spec.text.config.scheduler, on_gpu=self.gpu_use is not GpuUse.NEVER)
        if restart or not fits or any(change.taken is Taken.RESTART for change in found):
            return NextSpec(spec._checked(), lines, True, names)
        kept_steps = {name: getattr(old.built, name) for name in STEP_SIZES}
        return NextSpec(self.of(replace(spec.text, steps=kept_steps)), lines, False, names)

    def _checked(self) -> FleetSpec:
        """Raises `InvalidRequest` if services could not start."""
        try:
            self.check(self.text.config)
        except ConfigError as error:
            raise InvalidRequest("config", str(error)) from error
        return self

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


def _check_size(old: ConfigText, new: ConfigText) -> None:
    """Raises `InvalidRequest` for a config that no router could send to `tandem config`."""
    room = min(text.config.router.max_message_bytes for text in (old, new)) - MESSAGE_MARGIN
    size = len(json.dumps(new.tables))  # ASCII
    if size > room:
        raise InvalidRequest(
            "config", f"would have {size} bytes, but at most {room} fit into a message ([router] max_message_bytes)"
        )
